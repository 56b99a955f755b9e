/* Streams and events of an emulated NPU runtime, and what it says of itself.
 *
 * Work is done when it is queued, so there is nothing to wait for: an order that a real stream would not keep cannot be
 * seen here. Events know when they were recorded. No operator is known to the compiler: whoever asks for one, past the
 * emulation of operators in Python, gets an error.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, UNKNOWN_OPERATOR = 500002, COMPLETE = 1 };

struct stream {
    int32_t id;
};

struct event {
    double recorded_ms;
};

int aclInit(const char *config) {
    (void)config;
    return OK;
}

int aclFinalize(void) { return OK; }

const char *aclGetRecentErrMsg(void) { return "emulated: see the message before"; }

const char *aclrtGetSocName(void) { return "Ascend910B3"; }

int aclsysGetVersionStr(char *package, char *version) {
    (void)package;
    strcpy(version, "8.5.0");
    return OK;
}

int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
    (void)device;
    (void)attribute;
    *value = 24; /* cores */
    return OK;
}

int aclGetDeviceCapability(uint32_t device, int attribute, int64_t *value) {
    return aclrtGetDeviceInfo(device, attribute, value);
}

int aclrtDeviceGetBareTgid(int32_t *process) {
    *process = 1;
    return OK;
}

/* ---- streams */

int aclrtCreateStream(void **stream) {
    static int32_t next_id;
    struct stream *made = malloc(sizeof *made);
    made->id = __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED);
    *stream = made;
    return OK;
}

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    (void)priority;
    (void)flags;
    return aclrtCreateStream(stream);
}

int aclrtDestroyStream(void *stream) {
    free(stream);
    return OK;
}

int aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }

int aclrtStreamGetId(void *stream, int32_t *id) {
    *id = stream ? ((struct stream *)stream)->id : -1;
    return OK;
}

int aclrtStreamQuery(void *stream, int *status) {
    (void)stream;
    *status = COMPLETE;
    return OK;
}

int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) {
    (void)stream;
    *flag = 0;
    return OK;
}

int aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    (void)stream;
    function(argument);
    return OK;
}

int aclrtLaunchCallback(void (*function)(void *), void *argument, int block, void *stream) {
    (void)block;
    return aclrtLaunchHostFunc(stream, function, argument);
}

/* ---- events */

int aclrtCreateEventExWithFlag(void **event, uint32_t flags) {
    (void)flags;
    *event = calloc(1, sizeof(struct event));
    return OK;
}

int aclrtCreateEventWithFlag(void **event, uint32_t flags) { return aclrtCreateEventExWithFlag(event, flags); }

int aclrtDestroyEvent(void *event) {
    free(event);
    return OK;
}

int aclrtRecordEvent(void *event, void *stream) {
    (void)stream;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((struct event *)event)->recorded_ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return OK;
}

int aclrtEventElapsedTime(float *ms, void *from, void *to) {
    *ms = (float)(((struct event *)to)->recorded_ms - ((struct event *)from)->recorded_ms);
    return OK;
}

int aclrtQueryEventStatus(void *event, int *status) {
    (void)event;
    *status = COMPLETE;
    return OK;
}

int aclrtQueryEventWaitStatus(void *event, int *status) {
    (void)event;
    *status = 0; /* nobody waits any more */
    return OK;
}

/* ---- operators: none */

size_t aclGetCompileoptSize(int option) {
    (void)option;
    return 256;
}

int aclGetCompileopt(int option, char *value, size_t room) {
    (void)option;
    memset(value, 0, room);
    return OK;
}

static int refuse(const char *operator_name) {
    fprintf(stderr, "emulated NPU: operator %s was asked for outside of the emulation\n", operator_name);
    return UNKNOWN_OPERATOR;
}

int aclopCompileAndExecute(const char *operator_name, ...) { return refuse(operator_name); }

int aclopCompileAndExecuteV2(const char *operator_name, ...) { return refuse(operator_name); }

/* ---- the part of the C11 annex K that the library links against */

int vsnprintf_s(char *to, size_t room, size_t most, const char *format, va_list arguments) {
    (void)most;
    return vsnprintf(to, room, format, arguments);
}

int snprintf_s(char *to, size_t room, size_t most, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf_s(to, room, most, format, arguments);
    va_end(arguments);
    return written;
}

int strcpy_s(char *to, size_t room, const char *from) { return snprintf(to, room, "%s", from) < (int)room ? OK : 34; }
