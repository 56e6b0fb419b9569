// The graphs before and after a pass, side by side. A node that was not moved is in one row.

const isWhole = () => state.view.whole === "1";

function drawDiff(main) {
  const step = current.step,
    after = current.graph,
    before = current.before;
  if (!after) return put(main, notWritten());
  const none = "No pass has run on this graph yet. Select one on the left to see what it changed.";
  if (!step.after) return put(main, remark(none));
  const same = !current.changed || !before;
  if (same || !after.changes.size) {
    const what = same
      ? "changed nothing in this graph"
      : "changed only metadata that this dump does not contain";
    const done = step.error ? "failed before it changed a node" : what;
    return put(main, runLine(step), remark(`${step.after} ${done}.`));
  }
  const nodeOf = (item) => item.after || item.before;
  const list = pairList({
    label: `Nodes before and after ${step.after}`,
    graphs: [before, after],
    all: alignStep(before, after),
    names: ["before", "after"],
    unchanged: "unchanged",
    nodeOf,
    // A retagged node tells its new tag on the right, where the reader looks for it.
    about: (node, { before: one, after: other }, side) => {
      const changes = after.changes.get(node.id) || [];
      const retagged = changes.find(([kind]) => kind === "retagged");
      return {
        kinds: changes.map(([kind]) => kind),
        title: changes.map(([kind, detail]) => `${kind}: ${detail}`).join("\n") || node.note,
        change: retagged && one && other && side === "after" ? retagged[1] : "",
      };
    },
    pick: (item) => go({ node: nodeOf(item).id }),
  });
  const changed = (item) =>
    Boolean(item) &&
    (item.fold ? item.blocks.some((block) => block.items.some(isChanged)) : isChanged(item));
  const jump = (direction) => {
    const rows = list.rows(),
      active = list.list.active;
    const hunks = [...rows.keys()].filter((at) => changed(rows[at]) && !changed(rows[at - 1]));
    const next =
      direction > 0 ? hunks.find((at) => at > active) : hunks.findLast((at) => at < active);
    if (next === undefined) return;
    list.fill(next);
    list.element.focus();
  };
  const whole = (checked) => {
    keep({ whole: checked ? "1" : "" });
    redraw();
  };
  put(
    main,
    runLine(step),
    bar(
      changeChips(step.diff, true),
      stretchSpace(),
      button("↑ change", () => jump(-1), { title: "To the previous block of changed nodes" }),
      button("↓ change", () => jump(1), { title: "To the next block of changed nodes" }),
      checkBox("show the whole graph", isWhole(), whole),
      foldSwitch(list.count, redraw),
    ),
    sidesHead(["before", `after ${step.after}`], list.names),
    list.element,
  );
  list.fill();
}

function runLine(step) {
  const { run } = step;
  if (!run) return null;
  const before = current.before,
    after = current.graph;
  const change = (name, pick, text, more) => {
    if (!before || before === after) return null;
    const [one, other] = [pick(before.step), pick(after.step)];
    const arrow = `${name} ${text(one)} → ${text(other)} `;
    return el("span", {}, arrow, delta(one, other), one !== other && more);
  };
  const title =
    "Rewrites are what the pass counts itself, such as merged buckets. One rewrite may change " +
    "many nodes.";
  const why = { title: "The buffers that are new or gone at the peak, in Compare" };
  const rewrites = `${plural(run.changes, "rewrite")} in ${timeText(run.time_us)}`;
  return el(
    "div",
    { class: "runline" },
    el("h2", {}, run.text),
    el("span", { title }, `${rewrites}, verified in ${timeText(run.check_us)}`),
    change("peak", ({ peak }) => peak[0], bytesText, [" ", linkButton("Why?", comparePeaks, why)]),
    change("exposed", ({ schedule }) => schedule.exposed, timeText),
    muted(`checks: ${run.checks.join(", ") || "none"}`),
    run.notes.map((note) => el("p", {}, note)),
  );
}

// Compare with the graph before this pass, which stands on the left: what the pass added is new.
function comparePeaks() {
  let step = state.step - 1;
  while (step > 0 && !current.compile.at(current.data, step)) step--;
  compareWith(`${state.compile}/${state.graph}/${step}`, {});
}

// The rows of a pass, whose changes the report has.
function alignStep(before, after) {
  const moved = after.moved;
  const common = after.nodes.map(({ id }) => id).filter((id) => before.index.has(id));
  const stays = new Set(common.filter((id) => !moved.has(id)));
  const editsOf = (_, { id }) =>
    (after.changes.get(id) || []).map(([kind]) => kind).filter((kind) => kind !== "moved");
  return alignPairs(before, after, new Map(common.map((id) => [id, id])), stays, editsOf);
}
