"""Plants faults in a copy of the engine core; its quick tests find each: `python -m tests.engine_mutants`.

Prints one row per fault and "killed / planted"; exits with 1 when one survives. Not part of the normal test run.
"""

from __future__ import annotations

import sys

from tests.planted_faults import Mutant, Planting, run

SCHEDULER, ADMISSION, STATE, STEP = "scheduler.py", "admission.py", "request_state.py", "step.py"
SPECULATION, NGRAM, DRAFT, BATCH = "speculation.py", "ngram.py", "draft_layer.py", "batch.py"
WORKER, ENGINE, OUTBOX, CHECK = "model_worker.py", "execution_engine.py", "outbox.py", "request_check.py"
SECURED_FIRST = "decodes.sort(key=self._admission.is_secured, reverse=True)"
RUNS_OR_PULLS = "state.status is not Status.RECEIVING and request_id not in self._in_flight"
IF_CANCELLED = (
    "if scheduled.state.is_cancelled:\n                self._remove(scheduled.state)\n"
    "            else:\n                self._"
)
MUTANTS = (
    # who may own blocks
    Mutant("promises of those before are forgotten", ADMISSION, "chain((state,), admitted)", "(state,)"),
    Mutant(
        "no growth is promised",
        ADMISSION,
        "state.num_known + self._block_size, tokens",
        "state.num_known, tokens",
    ),
    Mutant("secured requests are promised one block", ADMISSION, "if not self.is_secured(state):", "if True:"),
    Mutant("every request is promised all", ADMISSION, "if not self.is_secured(state):", "if False:"),
    Mutant("secured one preemption late", ADMISSION, "state.preemptions >= self._max", "state.preemptions > self._max"),
    Mutant("shared blocks are not saved", ADMISSION, "room[key] += num_in_use[key]", "pass"),
    Mutant("shared blocks of windows count as saved", ADMISSION, "num_in_use.keys() - self._windows", "num_in_use"),
    Mutant("borrowed blocks are forgotten", ADMISSION, "need[key] += num_blocks", "pass"),
    Mutant(
        "borrowed blocks count for ever",
        ADMISSION,
        "get_num_skipped_tokens(computed) < state.cached_tokens",
        "get_num_skipped_tokens(computed) >= 0",
    ),
    Mutant(
        "a ticket's tokens count as pending",
        ADMISSION,
        "state.num_received if state.takes_ticket else state.num_computed",
        "state.num_computed",
    ),
    Mutant(
        "who owns blocks is asked as if it had none",
        ADMISSION,
        "if state.status is not Status.WAITING else None",
        "if False else None",
    ),
    Mutant("a judged prompt starts behind its prefix", ADMISSION, "if state.wants_prompt_logprobs:", "if False:"),
    Mutant("salt ignored", ADMISSION, "find_prefix(state.token_ids, salt)", 'find_prefix(state.token_ids, "")'),
    Mutant(
        "pulls are not promised anything",
        SCHEDULER,
        "if self._num_receiving:\n            yield",
        "if False:\n            yield",
    ),
    Mutant(
        "pulls take no seat", SCHEDULER, "len(self._running) + self._num_receiving < self", "len(self._running) < self"
    ),
    Mutant(
        "the last in the queue is admitted first",
        SCHEDULER,
        "admit(self._waiting[0], self._admitted()):\n            state = self._waiting.pop(0)",
        "admit(self._waiting[-1], self._admitted()):\n            state = self._waiting.pop()",
    ),
    Mutant(
        "nobody is admitted after a release",
        SCHEDULER,
        "self._remove(state)\n        self._admit()\n\n    # ---- a step",
        "self._remove(state)\n\n    # ---- a step",
    ),
    Mutant(
        "nobody is admitted after a step",
        SCHEDULER,
        "self._process_batch_output(batch, results, now)\n        self._admit()",
        "self._process_batch_output(batch, results, now)",
    ),
    Mutant(
        "nobody is admitted after a failed step",
        SCHEDULER,
        'failed: {error!r}"))\n        self._admit()',
        'failed: {error!r}"))',
    ),
    Mutant(
        "nobody is admitted after a cancel",
        SCHEDULER,
        f"if {RUNS_OR_PULLS}:\n            self._remove(state)\n            self._admit()",
        f"if {RUNS_OR_PULLS}:\n            self._remove(state)",
    ),
    Mutant("priority turned round", SCHEDULER, "now + request.priority *", "now - request.priority *"),
    # cancels, pulls, leases
    Mutant("cancel frees under a step", SCHEDULER, RUNS_OR_PULLS, "state.status is not Status.RECEIVING"),
    Mutant("cancel frees under a pull", SCHEDULER, RUNS_OR_PULLS, "request_id not in self._in_flight"),
    Mutant(
        "cancel takes a lease's blocks",
        SCHEDULER,
        "if state is None or state.status is Status.HELD:",
        "if state is None:",
    ),
    Mutant(
        "a cancelled request gets its step's tokens",
        SCHEDULER,
        f"{IF_CANCELLED}process",
        "if False:\n                pass\n            else:\n                self._process",
    ),
    Mutant(
        "a cancelled request is told of a failed step",
        SCHEDULER,
        f"{IF_CANCELLED}fail",
        "if False:\n                pass\n            else:\n                self._fail",
    ),
    Mutant(
        "a cancelled pull goes on as a request",
        SCHEDULER,
        "if state.is_cancelled:\n            self._remove",
        "if False:\n            self._remove",
    ),
    Mutant(
        "pulled tokens are one too many",
        SCHEDULER,
        "self._note_computed(state, state.num_received)",
        "self._note_computed(state, state.num_received + 1)",
    ),
    Mutant("what is cached is pulled again", SCHEDULER, "first_token=state.cached_tokens", "first_token=0"),
    Mutant("a preempted request pulls again", SCHEDULER, "state.takes_ticket = False", "pass"),
    Mutant(
        "who waits hears of a lost ticket only when its pull would start",
        SCHEDULER,
        "if state is None or state.status is not Status.WAITING or not state.takes_ticket:",
        "if True:",
    ),
    Mutant(
        "who waits to be recomputed loses a ticket it has used",
        SCHEDULER,
        "is not Status.WAITING or not state.takes_ticket:",
        "is not Status.WAITING:",
    ),
    Mutant(
        "a held request's blocks are freed at once",
        SCHEDULER,
        "if finish is FinishReason.PREFILLED:\n            self._hold(state)",
        "if False:\n            pass",
    ),
    Mutant("a lease of one token too few", SCHEDULER, "num_tokens=state.num_given", "num_tokens=state.num_given - 1"),
    Mutant(
        "a preempted prompt is not withdrawn",
        SCHEDULER,
        "self._withdraw_hold(state)\n        self._free_blocks(state)\n        state.num_computed = 0",
        "self._free_blocks(state)\n        state.num_computed = 0",
    ),
    Mutant(
        "a prompt that ends is not withdrawn",
        SCHEDULER,
        "self._withdraw_hold(state)\n        self._free_blocks(state)\n        del",
        "self._free_blocks(state)\n        del",
    ),
    Mutant("a complete lease is withdrawn", SCHEDULER, " and state.status is not Status.HELD:", ":"),
    Mutant("blocks that go back are told", SCHEDULER, "if key in self._growing}", "}"),
    Mutant("more is told than is ready", SCHEDULER, "num_ready=state.num_computed", "num_ready=state.num_computed + 1"),
    Mutant("the token that comes is asked for", STATE, "self.num_given += 1", "pass"),
    Mutant("the token that comes is lost", SCHEDULER, "state.give(next_token)", "pass"),
    Mutant("the token that comes is nowhere counted", STATE, "+ (self.takes_ticket and self.request.gets_token)", ""),
    Mutant(
        "the token that comes hides a full block", ADMISSION, "if state.num_known > len(state.token_ids):", "if False:"
    ),
    Mutant("any number is a token", SCHEDULER, "if not 0 <= next_token < self._limits.vocab_size:", "if False:"),
    # steps
    Mutant(
        "guesses are not charged to the budget",
        SCHEDULER,
        "budget - sum([s.num_positions for s in batch])",
        "budget - len(batch)",
    ),
    Mutant(
        "guesses take all that prompts could use", SCHEDULER, "(1 if len(decodes) == len(self._running) else 2)", "1"
    ),
    Mutant("spare budget is given to each", SCHEDULER, "num_spare -= len(scheduled.draft_ids)", "pass"),
    Mutant("a chunk is not charged to the budget", SCHEDULER, "budget -= chunk", "pass"),
    Mutant(
        "prompts come last in order",
        SCHEDULER,
        "for state in self._running:\n            if budget < 1:",
        "for state in reversed(self._running):\n            if budget < 1:",
    ),
    Mutant("the first in order is preempted", SCHEDULER, "reversed(self._running) if not", "self._running if not"),
    Mutant("secured requests are preempted", SCHEDULER, "if not self._admission.is_secured(s)), None)", "), None)"),
    Mutant("a request preempts itself", SCHEDULER, "if victim is None or victim is state:", "if victim is None:"),
    Mutant("secured requests wait for those they may preempt", SCHEDULER, SECURED_FIRST, "pass"),
    Mutant(
        "the preempted are scheduled",
        SCHEDULER,
        "state.status is Status.RUNNING and len(batch) < budget",
        "len(batch) < budget",
    ),
    Mutant("everybody waits", SCHEDULER, "while not batch and len(self._running) > 1:", "while False:"),
    Mutant("preempted but still computed", SCHEDULER, "state.num_computed = 0\n", "pass\n"),
    Mutant("borrowed blocks outlive a preemption", SCHEDULER, "state.num_borrowed = {}", "pass"),
    Mutant("log probabilities outlive a preemption", SCHEDULER, "state.prompt_logprobs.clear()", "pass"),
    Mutant("preemptions are not counted", SCHEDULER, "state.preemptions += 1", "pass"),
    Mutant(
        "who preempted loses its place",
        SCHEDULER,
        "insort(self._waiting, state, key=_order)\n        logger",
        "self._waiting.append(state)\n        logger",
    ),
    Mutant("lookahead has no slots", SCHEDULER, "num_new, plan.num_lookahead", "num_new, 0"),
    Mutant("guesses have no slots", SCHEDULER, "num_tokens + len(plan.draft_ids)", "num_tokens"),
    Mutant(
        "a failed step goes on",
        SCHEDULER,
        "for scheduled in batch:\n            if scheduled.state.is_cancelled:\n                self._remove",
        "for scheduled in batch[1:]:\n            if scheduled.state.is_cancelled:\n                self._remove",
    ),
    # results
    Mutant(
        "right guesses do not count as computed",
        SCHEDULER,
        "scheduled.num_tokens + len(result.tokens) - 1",
        "scheduled.num_tokens",
    ),
    Mutant(
        "wrong guesses count as computed",
        SCHEDULER,
        "scheduled.num_tokens + len(result.tokens) - 1",
        "scheduled.num_positions",
    ),
    Mutant(
        "tokens behind a stop token count as computed",
        SCHEDULER,
        "min(num_computed, len(state.token_ids))",
        "num_computed",
    ),
    Mutant(
        "computed content is not findable",
        SCHEDULER,
        "if self._has_prefix_cache and state.num",
        "if False and state.num",
    ),
    Mutant(
        "log probabilities of one chunk only",
        SCHEDULER,
        "state.prompt_logprobs += result.prompt_logprobs",
        "state.prompt_logprobs = list(result.prompt_logprobs)",
    ),
    Mutant("log probabilities are told twice", SCHEDULER, "        state.prompt_logprobs = []\n", ""),
    Mutant("times come with every token", SCHEDULER, "state.times(now) if is_first else None", "state.times(now)"),
    Mutant("guesses are not counted as computed", SCHEDULER, "self.counters.computed_tokens += num_drafts", "pass"),
    Mutant(
        "every guess counts as right",
        SCHEDULER,
        "accepted_tokens += len(result.tokens) - 1",
        "accepted_tokens += num_drafts",
    ),
    Mutant("cached tokens are not counted", SCHEDULER, "self.counters.cached_tokens += state.cached_tokens", "pass"),
    Mutant(
        "cached tokens count as received",
        SCHEDULER,
        "state.num_received - state.cached_tokens",
        "state.num_received",
    ),
    Mutant(
        "a stop token behind a guess is delivered",
        STATE,
        "if token.token_id in self.stop_token_ids:",
        "if not taken and token.token_id in self.stop_token_ids:",
    ),
    Mutant("one token too many", STATE, "len(taken) == num_missing", "len(taken) > num_missing"),
    Mutant(
        "a last token is handed over",
        STATE,
        "return taken, FinishReason.LENGTH\n",
        "return taken, FinishReason.PREFILLED if self.request.prefill_only else FinishReason.LENGTH\n",
    ),
    Mutant(
        "what a request came with counts as generated",
        STATE,
        "return len(self.token_ids) - self.num_given",
        "return len(self.token_ids) - self.request.num_prompt_tokens",
    ),
    Mutant("judged again after a preemption", STATE, " and not self.num_generated", ""),
    Mutant(
        "the last chunk samples one late",
        STEP,
        "self.num_tokens == self.state.num_pending",
        "self.num_tokens > self.state.num_pending",
    ),
    Mutant(
        "outputs are told again",
        OUTBOX,
        "self.events, self.pulls, self.holds, self._told_load = [], [], [], load",
        "self.pulls, self.holds, self._told_load = [], [], load",
    ),
    Mutant("a quiet step hides its holds", OUTBOX, "self.events or self.pulls or self.holds", "self.events"),
    Mutant(
        "a request of the greatest length is refused",
        CHECK,
        "request.max_new_tokens > limits",
        "request.max_new_tokens >= limits",
    ),
    Mutant(
        "the last token generated needs a slot",
        CHECK,
        "can_ever_hold(request.max_cached_tokens)",
        "can_ever_hold(request.max_cached_tokens + 1)",
    ),
    # guesses, rows, batches
    Mutant("a guess behind the last token", SPECULATION, "state.num_missing - 1)", "state.num_missing)"),
    Mutant("prefill guesses", SPECULATION, " or state.request.prefill_only", ""),
    Mutant(
        "lookahead one short", SPECULATION, "self.settings.num_tokens - 1, room", "self.settings.num_tokens - 2, room"
    ),
    Mutant("lookahead beyond the last token", SPECULATION, "- len(drafts) - 3", "- len(drafts) + 3"),
    Mutant("lookahead stops early", SPECULATION, "- len(drafts) - 3", "- len(drafts) - 4"),
    Mutant("every guess stands", SPECULATION, "draft_ids[num_right] == choices[num_right].token_id", "True"),
    Mutant(
        "a wrong guess loses the choice before it",
        SPECULATION,
        "choices[: num_right + 1]",
        "choices[: max(1, num_right)]",
    ),
    Mutant(
        "n-grams end with the text",
        NGRAM,
        "range(self._num_indexed + 1, len(token_ids))",
        "range(self._num_indexed + 1, len(token_ids) + 1)",
    ),
    Mutant("draft layer one position on", DRAFT, "position=self.position + 2", "position=self.position + 1"),
    Mutant(
        "draft layer follows wrong guesses",
        DRAFT,
        "if row.num_drafts:\n        return [token.token_id for token in chosen]",
        "if row.num_drafts:\n        return [*row.token_ids[1:], chosen[-1].token_id]",
    ),
    Mutant("draft layer stays where it is", DRAFT, "one.position += 1", "pass"),
    Mutant("guesses beyond what is missing", DRAFT, "row.num_missing - len(tokens) - 1", "row.num_missing"),
    Mutant("guesses verified in one line", BATCH, "if row.num_drafts:", "if False:"),
    Mutant("history without guesses", ENGINE, "[*known, *drafts] if", "[*known] if"),
    Mutant("prompt judged one token short", ENGINE, "known[first + 1 : end + 1]", "known[first + 1 : end]"),
    Mutant("an unfinished prompt is sampled", ENGINE, "sampling=sampling if is_sampled else None", "sampling=sampling"),
    Mutant("the history knows what comes later", WORKER, "row.history[:position]", "row.history"),
    Mutant(
        "all guesses drawn with one number",
        WORKER,
        "position = row.first + row.num_known + i",
        "position = row.first + row.num_known",
    ),
)

PLANTING = Planting(
    "pd_service/engine",
    ["kv_cache", "transfer", "pd_service", "tests"],
    [
        ["tests/test_scheduler_progress.py", "tests/test_scheduler_early.py"],
        ["tests/test_engine_lives.py", "tests/test_scheduler.py"],
        ["tests/test_speculation.py", "tests/test_integer_model.py"],
        ["tests/test_models_deepseek_draft.py", "tests/test_prompt_identity.py"],
        ["tests/test_split_equals_whole.py"],
    ],
)

if __name__ == "__main__":
    sys.exit(run(PLANTING, MUTANTS))
