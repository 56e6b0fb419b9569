"""Parameters: a gather reads the shard that its tag names, its readers keep reading that parameter,
and a reduction does not read the gradient of another parameter.

Values are followed backwards through nodes that pass them on (`operators.is_link`), through nodes
that the pass inserted, and up to collectives, whose tags name parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from zpasses.errors import PassError
from zpasses.graph.queries import communicates, numel
from zpasses.graph.tags import Tag
from zpasses.graph.verifier.operators import is_link
from zpasses.graph.verifier.provenance import (
    RESULT_ROLES,
    Provenance,
    computes_the_same,
    has_one_rank,
)
from zpasses.graph.verifier.reduced_outputs import check_reduced_outputs
from zpasses.graph.verifier.versions import CurrentGraph, PreviousGraph
from zpasses.graph.walks import reachable


def affected_by(changed: Sequence[fx.Node]) -> list[fx.Node]:
    """The changed nodes, and what their values reach through links and collectives, with the first
    readers behind them.
    """
    origins = set(changed)

    def readers(node: fx.Node) -> Iterable[fx.Node]:
        passes_on = is_link(node.target, "reduce") or communicates(node.target)
        return node.users if passes_on or node in origins else ()

    return list(reachable(changed, readers))


def check_params(
    affected: Sequence[fx.Node],
    now: CurrentGraph,
    before: PreviousGraph,
    pass_name: str,
    *,
    changes_outputs: bool,
) -> None:
    """Check the affected collectives, the readers of gathered values, and reduced outputs."""
    new, old = Provenance(now, before.is_new), Provenance(before, lambda node: False)
    erased = [node for node in before.nodes if node not in now]
    for node in affected:
        tag = now.record(node).tag
        if tag is None or node.op == "placeholder":
            continue
        if tag.role == "gather" and communicates(node.target):
            _check_gather_input(node, tag, new, old, pass_name)
        _check_result_tag(node, tag, new, old, pass_name)
    _check_reduction_inputs(affected, erased, new, old, pass_name)
    touched = set(affected)
    for node in affected:
        if node in before and not (changes_outputs and node.op == "output"):
            _check_reader(node, touched, new, old, pass_name)
            if node.op == "output":
                check_reduced_outputs(touched, new, old, pass_name)


# --- gathers --------------------------------------------------------------------------------------
def _check_gather_input(
    node: fx.Node, tag: Tag, new: Provenance, old: Provenance, pass_name: str
) -> None:
    members = new.inputs_by_param(node, tag.params)
    packed = len(members) > 1
    pairs = zip(members if packed else members * len(tag.params), tag.params, strict=True)
    for member, param in pairs if members else ():
        shards, ends = new.shards(param), new.source_shards(member)
        known = new.shard_params(member)
        expected = {param} if packed else set(tag.params)
        if known & expected or not shards or _shard_unread_before(old, param):
            continue
        found = ", ".join(sorted(end.name for end in ends)) or member.name
        raise PassError(
            f"pass {pass_name!r}: {node.format_node()} is tagged as the gather of {param!r}, but "
            f"reads {found}; expected the shard {shards[0].name}."
        )


def _shard_unread_before(old: Provenance, param: str) -> bool:
    """Whether no gather of a parameter came from its shard before the pass, as far as known."""
    found = [
        reads for node in old.version.nodes if (reads := old.reads_shard(node, param)) is not None
    ]
    return bool(found) and not any(found)


def _check_result_tag(
    node: fx.Node, tag: Tag, new: Provenance, old: Provenance, pass_name: str
) -> None:
    """The tag of a gathered value names a parameter of the gather that the value comes from."""
    if tag.role not in RESULT_ROLES["gather"]:
        return
    held = _source_params(new, node)
    if held and not held & set(tag.params) and not _was_mislabelled_before(node, tag, old):
        raise PassError(
            f"pass {pass_name!r}: {node.format_node()} is tagged as {tag.role} of "
            f"{', '.join(map(repr, tag.params))}, but holds {', '.join(sorted(held))}."
        )


def _source_params(provenance: Provenance, node: fx.Node) -> set[str]:
    """Returns the parameters that a value comes from. The tag of the value itself is ignored."""
    starts = provenance.source_gathers(node, ignore_own_tag=True)
    return {name for _, names in starts for name in names}


def _was_mislabelled_before(node: fx.Node, tag: Tag, old: Provenance) -> bool:
    if node not in old.version:
        return False
    was = old.version.record(node).tag
    held = _source_params(old, node)
    return was == tag and bool(held) and not held & set(tag.params)


# --- readers --------------------------------------------------------------------------------------
def _check_reader(
    node: fx.Node, touched: set[fx.Node], new: Provenance, old: Provenance, pass_name: str
) -> None:
    """A node that read or returned a gathered parameter still does."""
    if node.op == "output":
        ours, theirs = new.version.returned(), old.version.returned()
        pairs = [
            (f"output {i}", [got], [wanted])
            for i, (got, wanted) in enumerate(zip(ours, theirs, strict=False))
            if got is not wanted or got in touched
        ]
    else:
        pairs = [
            (node.format_node() or node.name, new.version.inputs(node), old.version.inputs(node))
        ]
    if node.op != "output" and (is_link(node.target, "gather") or communicates(node.target)):
        return
    for where, got, wanted in pairs:
        before = {
            name: each
            for each in wanted
            if isinstance(each, fx.Node)
            for name in old.params(each)
            if not _is_trivial(old, each)
        }
        if not before:
            continue
        after = {name for each in got if isinstance(each, fx.Node) for name in new.params(each)}
        for param, source in before.items():
            if param not in after:
                reads = ", ".join(each.name for each in got if isinstance(each, fx.Node))
                raise PassError(
                    f"pass {pass_name!r}: {where} must come from the gathered parameter {param!r} "
                    f"({source.name} before the pass), but comes from {reads or 'nothing'}"
                    f"{_describe_held(after)}."
                )


def _describe_held(names: set[str]) -> str:
    return f", which holds {', '.join(map(repr, sorted(names)))}" if names else ""


def _is_trivial(provenance: Provenance, node: fx.Node) -> bool:
    """Whether a value needs no communication: it is empty, or its groups have one rank."""
    if numel(provenance.version.record(node).value) == 0:
        return True
    groups = [
        provenance.version.record(start).arguments().get("group_name")
        for start, _ in provenance.source_gathers(node)
        if communicates(provenance.version.record(start).target)
    ]
    return bool(groups) and all(has_one_rank(group) for group in groups)


# --- reductions -----------------------------------------------------------------------------------
def _check_reduction_inputs(
    affected: Sequence[fx.Node],
    erased: Sequence[fx.Node],
    new: Provenance,
    old: Provenance,
    pass_name: str,
) -> None:
    """A reduction does not read the gradient that the reduction of another parameter read."""
    ours: dict[str, dict[fx.Node, fx.Node]] = {}
    for node in affected:
        for param, root in _reduced_roots(new, node):
            ours.setdefault(param, {})[root] = node
    theirs: dict[str, set[fx.Node]] = {}
    known = [node for node in affected if node in old.version]
    for node in (*known, *erased):
        for param, root in _reduced_roots(old, node):
            theirs.setdefault(param, set()).add(root)
    for param, roots in ours.items():
        for root, node in roots.items():
            if param not in theirs or root in theirs[param] or root not in old.version:
                continue
            owners = _reduced_from(old, root)
            if owners and param not in owners:
                if any(computes_the_same(old.version, root, each) for each in theirs[param]):
                    continue
                expected = ", ".join(sorted(each.name for each in theirs[param]))
                raise PassError(
                    f"pass {pass_name!r}: {node.format_node()} is tagged as the reduction of "
                    f"{param!r}, but reads {root.name}, the gradient of "
                    f"{', '.join(map(repr, sorted(owners)))}; expected {expected}."
                )


def _reduced_roots(provenance: Provenance, node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    record = provenance.version.record(node)
    if not communicates(record.target) or record.tag is None or record.tag.role != "reduce":
        return
    members, params = provenance.inputs_by_param(node, record.tag.params), record.tag.params
    if members:
        members = members * len(params) if len(members) == 1 else members
        yield from zip(params, map(provenance.skip_links, members), strict=True)


def _reduced_from(provenance: Provenance, root: fx.Node) -> set[str]:
    """The parameters whose reductions read a value through links."""
    version = provenance.version

    def links(node: fx.Node) -> list[fx.Node]:
        users = version.users(node)
        return [user for user in users if is_link(version.record(user).target, "gather")]

    return {
        param
        for node in reachable([root], links)
        for user in version.users(node)
        for param, start in _reduced_roots(provenance, user)
        if start is root
    }
