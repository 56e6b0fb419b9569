"""The order of accesses to memory on all streams: every read happens after its write, and every
access of a buffer happens before the buffer is freed, reused or returned.

Kernels run on the compute stream in graph order. A launch (a collective, or a copy by a copy
engine) runs on a stream of its own. It starts after everything that the compute stream was given
before it, and `wait_tensor` makes the compute stream wait for its end. A copy to the host or back
is a launch, too, which the wait that reads its ticket awaits. Vector clocks say which launches have
ended when a node runs. Two accesses of the same bytes race if neither is known to
happen before the other, and one of them writes.

Memory is freed after the last reader of its last alias, as the caching allocator and Inductor do:
whatever the compute stream is given next may overwrite it. Launches keep the buffers that they use
until they are awaited, except those of `operators.keeps_arguments`. When the graph ends, the caller
reads its outputs, and may overwrite its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.aliases import GETITEM, shared_arguments, written_arguments
from zpasses.graph.host_copies import HOST_STARTS, HOST_WAITS, OFFLOAD
from zpasses.graph.queries import WAIT, saved_inputs
from zpasses.graph.verifier.allocations import Aliases, Root
from zpasses.graph.verifier.operators import awaits_each_output, is_launch, keeps_arguments
from zpasses.graph.verifier.versions import CurrentGraph, GraphVersion, NodeRecord

StreamOf = Callable[[fx.Node, NodeRecord, int], str]
"""(launch, its record, number of the output) -> name of the stream on which it runs, in order with
others. The number is 0 unless the outputs are awaited separately.
"""


def own_stream(node: fx.Node, record: NodeRecord, output: int) -> str:
    """Every launch has a stream of its own, so nothing orders launches but waits. This is true of
    gloo, and safe for every backend.
    """
    which = f"{node.name}, output {output}" if output else node.name
    return f"{group_stream(node, record, output)} ({which})"


def group_stream(node: fx.Node, record: NodeRecord, output: int) -> str:
    """The launches of a group run in order, as with NCCL, and those of copy engines on another
    stream. Copies to the host and back have a stream each.
    """
    if record.target in HOST_STARTS:
        return "copies to the host" if record.target is OFFLOAD else "copies from the host"
    group = compat.group_name(record.arguments()["group_name"])
    functional = getattr(record.target, "namespace", "") == "_c10d_functional"
    return group if functional else f"copies of {group}"


@dataclass(frozen=True)
class Race:
    """Two accesses of one buffer whose order nothing determines."""

    node: fx.Node
    """The access that the graph has later, the last reader of a freed buffer, or the output."""
    launch: fx.Node
    """The launch that may still be running then."""
    buffer: fx.Node
    """The node that allocates the buffer."""
    stream: str
    """The stream of the launch."""
    text: str
    """What happens, and which wait is missing."""

    def __str__(self) -> str:
        return f"{self.node.format_node() or 'the output'} {self.text}"


def find_races(graph: fx.Graph, stream_of: StreamOf = own_stream) -> list[Race]:
    """Returns the races of a graph with fake values, in the order of its nodes.

    Args:
        stream_of: which launches share a stream, and so run in order.
    """
    return list(races_in(CurrentGraph(graph), stream_of))


def may_race(version: GraphVersion) -> bool:
    """Whether the graph is worth a look: a cheap test, which is True for all graphs with races.

    A functional graph whose launches are all awaited by their only readers has none.
    """
    for node in version.nodes:
        target = version.record(node).target
        if written_arguments(target):
            return True
        if is_launch(target) and not (keeps_arguments(target) and _is_awaited(version, node)):
            return True
    return False


def _is_awaited(version: GraphVersion, node: fx.Node) -> bool:
    users = version.users(node)
    return bool(users) and all(
        (target := version.record(user).target) is WAIT
        or (target is GETITEM and _is_awaited(version, user))
        for user in users
    )


# --- accesses -------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Launch:
    node: fx.Node
    stream: str
    number: int
    """How many launches its stream ran before it."""
    keeps: bool
    reads: list[_Region]
    writes: list[_Region]
    awaited_at: int | None = None


@dataclass(frozen=True)
class _Region:
    root: Root
    start: int = 0
    end: float = float("inf")

    def overlaps(self, other: _Region) -> bool:
        return self.root == other.root and self.start < other.end and other.start < self.end


@dataclass
class _Pending:
    """The accesses of launches that may be running."""

    accesses: dict[Root, list[tuple[_Launch, _Region, bool]]] = field(default_factory=dict)

    def add(self, launch: _Launch) -> None:
        for writes, regions in ((False, launch.reads), (True, launch.writes)):
            for region in regions:
                self.accesses.setdefault(region.root, []).append((launch, region, writes))

    def conflicts(
        self, region: _Region, writes: bool, done: dict[str, int], stream: str | None = None
    ) -> Iterator[tuple[_Launch, bool]]:
        """Yields (launch, whether it writes) for the launches that an access may not overtake and
        that are not known to have ended.
        """
        found = self.accesses.get(region.root)
        if not found:
            return
        found[:] = [each for each in found if each[0].number > done.get(each[0].stream, 0)]
        for launch, other, written in found:
            if (writes or written) and launch.stream != stream and region.overlaps(other):
                yield launch, written


class _Walk:
    """One walk over a graph."""

    def __init__(self, version: GraphVersion, stream_of: StreamOf) -> None:
        self._version, self._stream_of = version, stream_of
        self._aliases = Aliases(version)
        self._launches: dict[fx.Node, list[_Launch]] = {}
        self._last_use: dict[Root, int] = {}
        self._numbers: dict[str, int] = {}

    def races(self) -> Iterator[Race]:
        awaited = self._find_launches()
        freed: dict[int, list[Root]] = {}
        for root, at in self._lifetimes().items():
            freed.setdefault(at, []).append(root)
        done: dict[str, int] = {}
        """Stream -> how many of its launches the compute stream knows to have ended."""
        pending = _Pending()
        for at, node in enumerate(self._version.nodes):
            for launch in awaited.get(at, ()):
                done[launch.stream] = max(done.get(launch.stream, 0), launch.number)
            for launch in self._launches.get(node, ()):
                for writes, regions in ((False, launch.reads), (True, launch.writes)):
                    yield from self._check(node, regions, writes, pending, done, launch.stream)
                pending.add(launch)
            if node not in self._launches:
                reads, writes_ = self._accesses(node)
                yield from self._check(node, reads, False, pending, done)
                yield from self._check(node, writes_, True, pending, done)
            if self._version.record(node).op == "output":
                yield from self._at_end(node, pending, done)
            for root in freed.get(at, ()):
                for launch, written in pending.conflicts(_Region(root), True, done):
                    yield _race(node, launch, root, _freed(launch, written, root))

    def _check(
        self,
        node: fx.Node,
        regions: list[_Region],
        writes: bool,
        pending: _Pending,
        done: dict[str, int],
        stream: str | None = None,
    ) -> Iterator[Race]:
        for region in regions:
            for launch, written in pending.conflicts(region, writes, done, stream):
                yield _race(node, launch, region.root, _accessed(launch, written, region.root))

    def _at_end(self, node: fx.Node, pending: _Pending, done: dict[str, int]) -> Iterator[Race]:
        """The caller may overwrite inputs and outputs."""
        outside = [each for each in self._version.nodes if self._is_callers(each)]
        roots = [(each, 0) for each in outside] + [
            root for item in self._version.inputs(node) for root in self._aliases.roots(item)
        ]
        for root in dict.fromkeys(roots):
            for launch, written in pending.conflicts(_Region(root), True, done):
                if not written or root[0] in outside:
                    yield _race(node, launch, root, _left(launch, written, root))

    def _is_callers(self, node: fx.Node) -> bool:
        return self._version.record(node).op in ("placeholder", "get_attr")

    # --- what nodes do ----------------------------------------------------------------------------
    def _find_launches(self) -> dict[int, list[_Launch]]:
        """Finds launches, their waits, and the last use of each buffer. Returns the launches that
        the wait at a position awaits.
        """
        registered: dict[Root, list[_Launch]] = {}
        awaited: dict[int, list[_Launch]] = {}
        for at, node in enumerate(self._version.nodes):
            record = self._version.record(node)
            for item in (*self._version.inputs(node), node):
                for root in self._aliases.roots(item):
                    self._last_use[root] = at
            if record.target is WAIT or record.target in HOST_WAITS:
                for root in self._aliases.roots(self._version.inputs(node)[0]):
                    for launch in registered.pop(root, ()):
                        launch.awaited_at = at if launch.awaited_at is None else launch.awaited_at
                        awaited.setdefault(at, []).append(launch)
            elif is_launch(record.target):
                self._launches[node] = self._launch(node, record)
                for launch in self._launches[node]:
                    for region in launch.writes:
                        registered.setdefault(region.root, []).append(launch)
        return awaited

    def _launch(self, node: fx.Node, record: NodeRecord) -> list[_Launch]:
        written = record.nodes_at(written_arguments(record.target))
        read = [item for item in self._version.inputs(node) if item not in written]
        outputs = sorted(self._aliases.roots(node), key=lambda root: root[1])
        writes = self._regions(written) or [_Region(root) for root in outputs]
        given = record.arguments().get(0)
        if (
            awaits_each_output(record.target)
            and isinstance(given, (list, tuple))
            and len(given) == len(writes)
        ):
            pairs = [(self._regions([each]), [to]) for each, to in zip(given, writes, strict=True)]
        else:
            pairs = [(self._regions(read), writes)]
        found = []
        for place, (reading, writing) in enumerate(pairs):
            stream = self._stream_of(node, record, place)
            number = self._numbers[stream] = self._numbers.get(stream, 0) + 1
            keeps = keeps_arguments(record.target)
            found.append(_Launch(node, stream, number, keeps, reading, writing))
        return found

    def _accesses(self, node: fx.Node) -> tuple[list[_Region], list[_Region]]:
        """What the compute stream reads and writes for a node that is no launch."""
        record = self._version.record(node)
        if record.op in ("placeholder", "get_attr") or record.target in (WAIT, GETITEM):
            return [], []
        names = written_arguments(record.target) if record.op.startswith("call_") else ()
        written = record.nodes_at(names)
        is_view = record.op != "output" and shared_arguments(record.target) and not written
        read = (
            [] if is_view else [each for each in self._version.inputs(node) if each not in written]
        )
        return self._regions(read), self._regions(written)

    def _regions(self, nodes: Iterable[fx.Node]) -> list[_Region]:
        return [
            self._region(root, self._version.record(node).value)
            for node in nodes
            for root in self._aliases.roots(node)
        ]

    def _region(self, root: Root, value: object) -> _Region:
        """The bytes of a value: from its first to its last element, if its place in the buffer is
        known, else the whole buffer.
        """
        base = self._version.record(root[0]).value
        if not (isinstance(value, Tensor) and isinstance(base, Tensor)):
            return _Region(root)
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        if compat.storage_id(value) != compat.storage_id(base) or not all(
            type(size) is int for size in sizes
        ):
            return _Region(root)
        if not value.numel():
            return _Region(root, 0, 0)
        pairs = zip(value.shape, value.stride(), strict=True)
        last = sum((int(size) - 1) * int(step) for size, step in pairs)
        first, width = int(value.storage_offset()), value.element_size()
        return _Region(root, first * width, (first + last + 1) * width)

    def _lifetimes(self) -> dict[Root, int]:
        """Buffer that the graph frees -> position of the node after which it is freed."""
        donated = saved_inputs(self._version.nodes, lambda node: self._version.record(node).tag)
        kept: dict[Root, float] = {}
        for launch in (each for several in self._launches.values() for each in several):
            if launch.keeps:
                until = float("inf") if launch.awaited_at is None else launch.awaited_at
                for region in (*launch.reads, *launch.writes):
                    kept[region.root] = max(kept.get(region.root, 0), until)
        end = len(self._version.nodes) - 1
        return {
            root: int(until)
            for root, last in self._last_use.items()
            if (until := max(last, kept.get(root, 0))) < end
            and (root[0] in donated or not self._is_callers(root[0]))
        }


def races_in(version: GraphVersion, stream_of: StreamOf = own_stream) -> Iterator[Race]:
    """Yields the races of one version of a graph."""
    return _Walk(version, stream_of).races()


# --- messages -------------------------------------------------------------------------------------
def _race(node: fx.Node, launch: _Launch, root: Root, text: str) -> Race:
    return Race(node, launch.node, root[0], launch.stream, text)


def _place(launch: _Launch, root: Root) -> str:
    which = f"output {root[1]} of {root[0].name}" if root[1] else root[0].name
    return f"the buffer of {which}, on stream {launch.stream}"


def _named(launch: _Launch) -> str:
    kind = "copy" if launch.node.target in HOST_STARTS else "collective"
    return f"the {kind} {launch.node.name}"


def _wait(launch: _Launch) -> str:
    name = "wait_tensor"
    if launch.node.target in HOST_STARTS:
        name = "offload_wait" if launch.node.target is OFFLOAD else "reload_wait"
    return f"{name}({launch.node.name})"


def _accessed(launch: _Launch, written: bool, root: Root) -> str:
    what = (
        f"reads or writes what {_named(launch)} is writing"
        if written
        else f"writes to the input of {_named(launch)}, which is still running"
    )
    return f"{what}: {_place(launch, root)}. {_wait(launch)} must come first."


def _freed(launch: _Launch, written: bool, root: Root) -> str:
    verb = "writes" if written else "reads"
    return (
        f"is the last to need a buffer that {_named(launch)}, which is still running, {verb}: "
        f"{_place(launch, root)}. It is freed, and may be reused. {_wait(launch)} must come before "
        "the last reader."
    )


def _left(launch: _Launch, written: bool, root: Root) -> str:
    verb = "writes" if written else "reads"
    return (
        f"ends the graph while {_named(launch)} is still running and {verb} "
        f"{_place(launch, root)}, which the caller may overwrite. {_wait(launch)} must come first."
    )
