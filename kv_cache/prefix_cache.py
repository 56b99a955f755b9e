"""Which blocks hold content that another request can use: the content itself, and a pool whose blocks keep theirs.

    salt ── node ── node ── node        one node per full block of tokens, chained; known by (parent, token ids)
                      │       │
    pool A           7       12         a pool maps nodes to blocks: one block at most per node

A node is found by a hash and confirmed by comparing its tokens and its parent, so equal hashes of different content do
no harm. It lives as long as a block holds it, a later node follows it, or a running request stands on it.

A registered block of `CachingBlockPool` is used by one or several tables, or it waits, unused but findable, until it is
evicted, the least recently used one first. Blocks that lie apart grow together only while they are free at once, so up
to an eighth of the pool is evicted before it is needed, when else a request's blocks would be scattered.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kv_cache.block_pool import BlockPool, require

# Evicted for the sake of long runs: while no more than this part of the pool is without content, at most so many blocks
# for each one asked for, which bounds the time of a call, so many between two looks.
MAX_SPARE_SHARE, MAX_SPARE_EVICTIONS, EVICTIONS_AT_ONCE = 8, 4, 16


def blake2b_128(content: bytes) -> bytes:
    """16 bytes, equal in all processes and on all machines."""
    return blake2b(content, digest_size=16).digest()


@dataclass(eq=False, slots=True)
class ContentNode:
    """The content of one full block after that of `parent`; the root of a salt has no tokens. Equal means identical."""

    parent: ContentNode | None = field(repr=False)  # a chain is as long as its prompt
    key: bytes
    token_ids: tuple[int, ...]
    salt: str
    num_uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The first `num_tokens` tokens of a prompt are cached. A promise of nothing: it takes no block."""

    salt: str
    nodes: tuple[ContentNode, ...]
    num_tokens: int


class PrefixCache:
    """All content known to one engine.

    `fingerprint` stands for everything but tokens and salt that changes the KV: model, weights, adapter, dtype. Only
    requests of equal salt share content.
    """

    def __init__(self, fingerprint: str, hash_function: Callable[[bytes], bytes] = blake2b_128) -> None:
        self._fingerprint = fingerprint
        self._hash = hash_function
        self._roots: dict[str, ContentNode] = {}
        self._index: dict[bytes, list[ContentNode]] = {}
        self._ends: dict[str, tuple[ContentNode, int]] = {}  # of each running request: its last node, and nodes so far

    def find(self, token_ids: Sequence[int], salt: str, block_size: int) -> list[ContentNode]:
        """The longest chain of nodes that `token_ids` starts with, one token at least left over. Changes nothing."""
        found: list[ContentNode] = []
        node = self._roots.get(salt)
        for start in range(0, (len(token_ids) - 1) // block_size * block_size, block_size):
            if node is None:
                break
            node = self._find_child(node, tuple(token_ids[start : start + block_size]))
            if node is not None:
                found.append(node)
        return found

    def begin(self, request_id: str, hit: PrefixHit) -> None:
        """A request starts with the content of `hit`."""
        node = hit.nodes[-1] if hit.nodes else self._root(hit.salt)
        node.num_uses += 1
        self._ends[request_id] = node, len(hit.nodes)

    def extend(
        self, request_id: str, token_ids: Sequence[int], num_blocks: int, block_size: int
    ) -> list[tuple[int, ContentNode]]:
        """(block index, node) of the request's blocks up to `num_blocks` that were not known to be computed before."""
        node, num_known = self._ends[request_id]
        new: list[tuple[int, ContentNode]] = []
        for index in range(num_known, num_blocks):
            child = self._child(node, tuple(token_ids[index * block_size : (index + 1) * block_size]))
            child.num_uses += 1
            self.release(node)
            node = child
            new.append((index, node))
        self._ends[request_id] = node, max(num_known, num_blocks)
        return new

    def knows(self, request_id: str) -> bool:
        return request_id in self._ends

    def end(self, request_id: str) -> None:
        """A request is over. Nothing happens for one that did not begin here."""
        if request_id in self._ends:
            self.release(self._ends.pop(request_id)[0])

    def release(self, node: ContentNode) -> None:
        """One use of `node` less; it is forgotten after the last, and then its parent may be."""
        current: ContentNode | None = node
        while current is not None:
            current.num_uses -= 1
            if current.num_uses:
                return
            self._forget(current)
            current = current.parent

    def check(self, held: Iterable[ContentNode]) -> None:
        """Recounts the uses of every node; `held` are the nodes of all pools' blocks. Raises CacheInvariantError."""
        nodes = [node for same_key in self._index.values() for node in same_key]
        uses = Counter([*held, *(node for node, _ in self._ends.values()), *(n.parent for n in nodes if n.parent)])
        known = {*nodes, *self._roots.values()}
        require(uses.keys() == known, f"{len(uses)} contents are in use, {len(known)} are known")
        require(all(uses[node] == node.num_uses for node in known), f"uses of contents differ from {uses}")

    def _find_child(self, parent: ContentNode, token_ids: tuple[int, ...]) -> ContentNode | None:
        return self._find_by_key(self._key(parent, token_ids), parent, token_ids)

    def _find_by_key(self, key: bytes, parent: ContentNode, token_ids: tuple[int, ...]) -> ContentNode | None:
        for node in self._index.get(key, ()):
            if node.parent is parent and node.token_ids == token_ids:
                return node
        return None

    def _child(self, parent: ContentNode, token_ids: tuple[int, ...]) -> ContentNode:
        key = self._key(parent, token_ids)
        node = self._find_by_key(key, parent, token_ids)
        if node is None:
            node = ContentNode(parent, key, token_ids, parent.salt)
            self._index.setdefault(key, []).append(node)
            parent.num_uses += 1
        return node

    def _key(self, parent: ContentNode, token_ids: tuple[int, ...]) -> bytes:
        return self._hash(parent.key + struct.pack(f"<{len(token_ids)}q", *token_ids))

    def _root(self, salt: str) -> ContentNode:
        if salt not in self._roots:
            fingerprint = self._fingerprint.encode()
            content = struct.pack("<q", len(fingerprint)) + fingerprint + salt.encode()
            self._roots[salt] = ContentNode(None, self._hash(content), (), salt)
        return self._roots[salt]

    def _forget(self, node: ContentNode) -> None:
        if node.parent is None:
            del self._roots[node.salt]
            return
        same_key = self._index[node.key]
        same_key.remove(node)
        if not same_key:
            del self._index[node.key]


class CachingBlockPool(BlockPool):
    """A block pool whose registered blocks can be shared, and keep their content until they are taken for other."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache) -> None:
        super().__init__(num_blocks, block_size)
        self.num_evicted = 0
        self._prefix_cache = prefix_cache
        self._block_of: dict[ContentNode, int] = {}
        self._node_of: dict[int, ContentNode] = {}
        self._num_users: dict[int, int] = {}  # of registered blocks
        self._unused: OrderedDict[int, None] = OrderedDict()  # those without user, least recently used first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: those without content, and those whose content nobody uses."""
        return self._free_map.num_free + len(self._unused)

    @property
    def num_cached_blocks(self) -> int:
        """Unused blocks that still hold content."""
        return len(self._unused)

    def find(self, node: ContentNode) -> int | None:
        return self._block_of.get(node)

    def count_unused(self, blocks: Iterable[int]) -> int:
        """How many of these registered blocks would no longer be free if they were shared."""
        return sum(block in self._unused for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more table uses these registered blocks."""
        for block in blocks:
            self._num_users[block] += 1
            self._unused.pop(block, None)

    def register(self, block: int, node: ContentNode) -> None:
        """`block`, in use, now holds the content of `node`. Nothing happens if another block does already."""
        if node not in self._block_of and block not in self._node_of:
            node.num_uses += 1
            self._block_of[node] = block
            self._node_of[block] = node
            self._num_users[block] = 1

    def get_new_blocks(self, n: int) -> list[int]:
        """As in `BlockPool`. Evicts content where too few blocks are without, or no run of them is long enough."""
        self._check_available(n)
        if self._unused and not self._free_map.has_run(n):
            self._evict_for(n)
        return super().get_new_blocks(n)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """One table less uses `blocks`; null blocks among them are skipped. Refuses what `BlockPool` refuses."""
        real = self._to_free(blocks)
        if not self._unused.keys().isdisjoint(real):
            raise ValueError(f"double free in {real}: a block is free already")
        super().free_blocks([block for block in real if block not in self._node_of])
        for block in real:
            if block in self._node_of:
                self._num_users[block] -= 1
                if not self._num_users[block]:
                    self._unused[block] = None

    def nodes(self) -> Iterable[ContentNode]:
        return self._block_of.keys()

    def check(self, owned: Iterable[int]) -> None:
        """As in `BlockPool`; besides, a registered block may be owned several times, as often as it has users."""
        num_owners = Counter(owned)
        users = {block: num for block, num in self._num_users.items() if num}
        registered = {block: num_owners[block] for block in self._node_of if num_owners[block]}
        require(users == registered, f"shared blocks have owners {registered}, counted: {users}")
        require(self._unused.keys() == self._num_users.keys() - users.keys(), f"unused: {list(self._unused)}")
        require({node: b for b, node in self._node_of.items()} == self._block_of, "blocks and contents differ")
        require(self._num_users.keys() == self._node_of.keys(), "users and contents differ")
        owned_once = [b for block, num in num_owners.items() for b in [block] * (1 if block in users else num)]
        super().check([*owned_once, *self._unused])

    def _evict_for(self, n: int) -> None:
        """What is lacking, and then, within the limits, until `n` blocks without content lie in one run."""
        self._evict_blocks(max(0, n - self._free_map.num_free))
        num_spare = self.num_usable_blocks // MAX_SPARE_SHARE - self._free_map.num_free
        num_left = min(num_spare, MAX_SPARE_EVICTIONS * n, len(self._unused))
        while num_left > 0 and not self._free_map.has_run(n):
            num = min(num_left, EVICTIONS_AT_ONCE)
            self._evict_blocks(num)
            num_left -= num

    def _evict_blocks(self, num: int) -> None:
        self._free_map.put_back([self._evict() for _ in range(num)])

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        node = self._node_of.pop(block)
        del self._block_of[node], self._num_users[block]
        self._prefix_cache.release(node)
        self.num_evicted += 1
        return block
