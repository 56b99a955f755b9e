"""Plants faults in a copy of kv_cache, one at a time, and shows that the laws find each: `python -m tests.kv_mutants`.

Prints one row per fault and "killed / planted"; exits with 1 when one survives. Not part of the normal test run.
"""

from __future__ import annotations

import sys

from tests.planted_faults import Mutant, Planting, run

MANAGER, SINGLE, POOL = "kv_cache_manager.py", "single_type_kv_cache_manager.py", "block_pool.py"
MAP, PREFIX, UTILS = "free_map.py", "prefix_cache.py", "cache_utils.py"
WINDOW = "max(0, num_computed_tokens - self.sliding_window + 1)"
MUTANTS = (
    Mutant("reference count not raised", PREFIX, "self._num_users[block] += 1", "pass"),
    Mutant("shared block stays in the free queue", PREFIX, "self._unused.pop(block, None)", "pass"),
    Mutant("window off by one, too short", SINGLE, WINDOW, "max(0, num_computed_tokens - self.sliding_window + 2)"),
    Mutant("window off by one, too long", SINGLE, WINDOW, "max(0, num_computed_tokens - self.sliding_window)"),
    Mutant(
        "request freed head first", SINGLE, "self.req_to_blocks[request_id][::-1]", "self.req_to_blocks[request_id]"
    ),
    Mutant("newest content evicted first", PREFIX, "popitem(last=False)", "popitem(last=True)"),
    Mutant("hash without token comparison", PREFIX, "node.parent is parent and node.token_ids == token_ids", "True"),
    Mutant("hash without comparison of the past", PREFIX, "node.parent is parent and ", ""),
    Mutant("null block freed", POOL, "if block != self._null_block]", "if block != -1]"),
    Mutant(
        "null block handed out",
        MAP,
        "self._is_free[0] = 0",
        "self.num_free = num_ids",
    ),
    Mutant("a taken run stays free", MAP, "self._is_free[start:end] = bytes(end - start)", "pass"),
    Mutant("a taken block stays free", MAP, "self._is_free[start] = 0", "pass"),
    Mutant(
        "a run is cut short", MAP, "is_free.find(0, start + length, start + n)", "is_free.find(0, start, start + 1)"
    ),
    Mutant("low blocks are forgotten", MAP, "self._lowest = min(self._lowest, *ids)", "self._lowest = self._lowest"),
    Mutant("double free", POOL, " or self._free_map.has_any(real)", ""),
    Mutant(
        "no limit to spare evictions",
        PREFIX,
        "MAX_SPARE_SHARE, MAX_SPARE_EVICTIONS, EVICTIONS_AT_ONCE = 8",
        "MAX_SPARE_SHARE, MAX_SPARE_EVICTIONS, EVICTIONS_AT_ONCE = 1",
    ),
    Mutant(
        "no eviction for a run",
        PREFIX,
        "MAX_SPARE_SHARE, MAX_SPARE_EVICTIONS, EVICTIONS_AT_ONCE = 8, 4",
        "MAX_SPARE_SHARE, MAX_SPARE_EVICTIONS, EVICTIONS_AT_ONCE = 8, 0",
    ),
    Mutant("check and allocation disagree", MANAGER, "num_new + num_unused)", "num_new)"),
    Mutant("check too strict by one", MANAGER, "need.num_from_free > manager", "need.num_from_free >= manager"),
    Mutant(
        "only the first group is checked",
        MANAGER,
        "zip(managers, needs, strict=True):\n            if",
        "zip(managers, needs[:1], strict=False):\n            if",
    ),
    Mutant(
        "lookahead counts as computed",
        MANAGER,
        "min(computed_tokens, self.max_model_len)\n        num_tokens",
        "min(computed_tokens + num_new_tokens, self.max_model_len)\n        num_tokens",
    ),
    Mutant(
        "reclaim forgotten between steps",
        SINGLE,
        "(num_gone + 1) * self.block_size +",
        "(num_gone + 2) * self.block_size +",
    ),
    Mutant(
        "chunk goes back one late",
        SINGLE,
        "self.get_num_skipped_tokens(num_computed_tokens) + self.attention_chunk",
        "self.get_num_skipped_tokens(num_computed_tokens) + self.attention_chunk + 1",
    ),
    Mutant(
        "hit longer than its window",
        SINGLE,
        "num_in_a_row >= length - num_skipped",
        "num_in_a_row >= length - num_skipped - 1",
    ),
    Mutant("all of a prompt is a hit", PREFIX, "(len(token_ids) - 1) // block_size", "len(token_ids) // block_size"),
    Mutant(
        "half-filled block visible",
        MANAGER,
        "num_computed // block_size, block_size",
        "-(-num_computed // block_size), block_size",
    ),
    Mutant(
        "evicted block still findable",
        PREFIX,
        "del self._block_of[node], self._num_users[block]",
        "del self._num_users[block]",
    ),
    Mutant("salt ignored", PREFIX, "node = self._roots.get(salt)", "node = next(iter(self._roots.values()), None)"),
    Mutant(
        "content leaks with its request",
        PREFIX,
        "self.release(self._ends.pop(request_id)[0])",
        "self._ends.pop(request_id)",
    ),
    Mutant("stale hit trusted", MANAGER, "if len(shared) != len(found):", "if False:"),
    Mutant("lease released twice", MANAGER, "self._leases.remove(lease_id)", "pass"),
    Mutant(
        "lease keeps the request's table",
        SINGLE,
        "self.req_to_blocks.pop(request_id)",
        "self.req_to_blocks[request_id]",
    ),
    Mutant(
        "free does not wait for the pull", MANAGER, "if pull_id := self._pull_of.pop(request_id, None):", "if False:"
    ),
    Mutant("request grows under a pull", MANAGER, "self._rooms[request_id].next_reclaim = 0", "pass"),
    Mutant("shared content written again", MANAGER, "room.num_fixed <= computed_tokens <", "0 <= computed_tokens <"),
    Mutant("double free of cached content", PREFIX, "if not self._unused.keys().isdisjoint(real):", "if False:"),
    Mutant("received head gets real blocks", SINGLE, "max(num_existing, num_skipped))", "num_existing)"),
    Mutant(
        "peak forgets the chunk",
        SINGLE,
        "num_window_blocks(self.sliding_window - 1 + max_step_tokens,",
        "num_window_blocks(self.sliding_window,",
    ),
    Mutant(
        "padding is not the null block", UTILS, "np.zeros((len(rows), lens.max())", "np.ones((len(rows), lens.max())"
    ),
    Mutant("slots in the null block", UTILS, "if not block.all():", "if False:"),
    Mutant("groups keyed by type", SINGLE, "setdefault(entry.group_key,", "setdefault(entry.attn_type,"),
    Mutant("states grow", SINGLE, "return 1 + self.next_n", "return 1 + self.next_n + num_tokens // 64"),
)


PLANTING = Planting("kv_cache", ["kv_cache", "tests/*kv_*.py"], [["tests/test_kv_*.py"]])

if __name__ == "__main__":
    sys.exit(run(PLANTING, MUTANTS))
