// The graphs before and after a pass, side by side. A node that was not moved is in one row.

const CONTEXT = 3;
const isWhole = () => state.view.whole === "1";
const openGaps = new Set();
const DIFF_SIDES = ["before", "after"];

function drawDiff(main) {
  const step = current.step,
    after = current.graph,
    before = current.before;
  if (!after) return put(main, notWritten());
  if (!step.after)
    return put(
      main,
      el(
        "p",
        { class: "muted pad" },
        "No pass has run on this graph yet. Select a pass on the left to see what it changed.",
      ),
    );
  if (!current.changed || !before)
    return put(
      main,
      runLine(step),
      el(
        "p",
        { class: "muted pad" },
        step.error
          ? `${step.after} failed before it changed a node.`
          : `${step.after} changed nothing in this graph.`,
      ),
    );
  if (!after.changes.size)
    return put(
      main,
      runLine(step),
      el(
        "p",
        { class: "muted pad" },
        step.error
          ? `${step.after} failed before it changed a node.`
          : `${step.after} changed only metadata that this dump does not contain.`,
      ),
    );
  const aligned = alignRows(before, after);
  const folds = isFolded(after.nodes.length);
  const rows = shownRows(
    folds ? foldChanges(before, after, aligned) : foldUnchanged(aligned),
  );
  const list = rowList({
    label: `Nodes before and after ${step.after}`,
    row: (at) =>
      rows[at].fold
        ? foldRow(rows[at], blockNodes, kindChips(rows[at].blocks))
        : diffRow(before, after, rows[at]),
    pick: (at) => {
      const item = rows[at];
      if (item.fold) {
        toggleFold(item);
        redraw();
      } else if (item.gap) {
        openGaps.add(item.key);
        redraw();
      } else go({ node: (item.after || item.before).id });
    },
  });
  const changed = (item) =>
    Boolean(item) && !item.gap && (item.fold ? hasChanges(item) : item.kinds.length > 0);
  const hunks = rows.flatMap((item, at) => (changed(item) && !changed(rows[at - 1]) ? [at] : []));
  const jump = (direction) => {
    const next =
      direction > 0
        ? hunks.find((at) => at > list.active)
        : hunks.findLast((at) => at < list.active);
    if (next === undefined) return;
    list.fill(rows.length, next);
    list.element.focus();
  };
  put(
    main,
    runLine(step),
    el(
      "div",
      { class: "bar" },
      changeChips(step.diff, true),
      el("span", { class: "stretch" }),
      button("↑ change", () => jump(-1), { title: "To the previous block of changed nodes" }),
      button("↓ change", () => jump(1), { title: "To the next block of changed nodes" }),
      el(
        "label",
        {},
        el("input", {
          type: "checkbox",
          checked: isWhole(),
          onchange: (event) => {
            keep({ whole: event.target.checked ? "1" : "" });
            redraw();
          },
        }),
        " show the whole graph",
      ),
      foldSwitch(after.nodes.length, redraw),
    ),
    sidesHead(["before", `after ${step.after}`], DIFF_SIDES),
    list.element,
  );
  list.fill(
    rows.length,
    rows.findIndex(
      (item) =>
        !item.gap &&
        !item.fold &&
        state.node !== null &&
        (item.after || item.before).id === state.node,
    ),
  );
}

// The rows of a difference by layer. Within an open layer, unchanged stretches are folded too.
function foldChanges(before, after, aligned) {
  const layers = layersOf(after),
    earlier = layersOf(before);
  const isSelected = (item) =>
    state.node !== null && (item.after || item.before).id === state.node;
  const rows = foldRows(
    aligned,
    (item) => (item.after ? layers.get(item.after.id) : earlier.get(item.before.id)),
    `${state.graph}/${state.step}/diff`,
    isSelected,
  );
  return isWhole() ? rows : withoutUnchanged(rows);
}

// Keeps folds, and of the items between two folds those near a change.
function withoutUnchanged(rows) {
  const shown = [];
  let items = [];
  const flush = () => {
    shown.push(...foldUnchanged(items));
    items = [];
  };
  for (const row of rows) {
    if (row.fold) {
      flush();
      shown.push(row);
    } else items.push(row);
  }
  flush();
  return shown;
}

function blockNodes(block) {
  return block.items.map((item) => item.after || item.before);
}

function hasChanges(row) {
  return row.blocks.some((block) => block.items.some((item) => item.kinds.length));
}

// How many rows of each kind of change every layer of a fold has.
function kindChips(blocks) {
  const count = (kind) => (block) => block.items.filter((item) => item.kinds.includes(kind)).length;
  const found = CHANGES.filter((kind) => blocks.some(count(kind)));
  if (!found.length) return el("span", { class: "muted" }, "unchanged");
  return found.map((kind) =>
    chip(kind, `${SIGNS[kind]} ${rangeText(blocks, count(kind), countText)}`, `${kind}, in each layer`),
  );
}

function runLine(step) {
  const run = step.run;
  if (!run) return null;
  const before = current.before,
    after = current.graph;
  return el(
    "div",
    { class: "runline" },
    el("h2", {}, run.text),
    el(
      "span",
      {
        title:
          "Rewrites are what the pass counts itself, such as merged buckets. One rewrite may " +
          "change many nodes.",
      },
      `${plural(run.changes, "rewrite")} in ${timeText(run.time_us)}, ` +
        `verified in ${timeText(run.check_us)}`,
    ),
    before &&
      before !== after &&
      el(
        "span",
        {},
        `peak ${bytesText(before.step.peak[0])} → ${bytesText(after.step.peak[0])} `,
        delta(before.step.peak[0], after.step.peak[0]),
        before.step.peak[0] !== after.step.peak[0] && [
          " ",
          button("Why?", comparePeaks, {
            class: "link",
            title: "The buffers that are new or gone at the peak, in Compare",
          }),
        ],
      ),
    before &&
      before !== after &&
      el(
        "span",
        {},
        `exposed ${timeText(before.step.schedule.exposed)} → ` +
          `${timeText(after.step.schedule.exposed)} `,
        delta(before.step.schedule.exposed, after.step.schedule.exposed),
      ),
    el("span", { class: "muted" }, `checks: ${run.checks.join(", ") || "none"}`),
    run.notes.map((note) => el("p", {}, note)),
  );
}

// Compare with the graph before this pass, which stands on the left: what the pass added is new.
function comparePeaks() {
  let step = state.step - 1;
  while (step > 0 && !current.compile.at(current.data, step)) step--;
  const at = `${compiles.indexOf(current.compile)}/${state.graph}/${step}`;
  state.view = { ...state.view, with: at, other: "", swap: "" };
  go({ tab: "compare", node: null });
}

// Returns rows {before, after, kinds}. A node that was not moved is one row with both sides set.
// Removed, inserted and moved nodes fill the rows in between.
function alignRows(before, after) {
  const moved = new Set((after.step.diff.moved || []).map(([id]) => id));
  const kinds = (id) => (after.changes.get(id) || []).map(([kind]) => kind);
  const rows = [];
  let at = 0;
  const flush = (left, right) => {
    for (let i = 0; i < Math.max(left.length, right.length); i++) {
      const one = left[i],
        other = right[i];
      rows.push({
        before: one,
        after: other,
        kinds: [...new Set([...(one ? kinds(one.id) : []), ...(other ? kinds(other.id) : [])])],
      });
    }
  };
  let right = [];
  for (const node of after.nodes) {
    if (!before.index.has(node.id) || moved.has(node.id)) {
      right.push(node);
      continue;
    }
    const left = [];
    while (at < before.nodes.length && before.nodes[at].id !== node.id)
      left.push(before.nodes[at++]);
    flush(left, right);
    right = [];
    rows.push({ before: before.nodes[at++], after: node, kinds: kinds(node.id), anchor: true });
  }
  flush(before.nodes.slice(at), right);
  return rows;
}

// Replaces each long run of unchanged rows by one row that expands it on a click.
function foldUnchanged(rows) {
  if (isWhole()) return rows;
  const near = new Uint8Array(rows.length);
  rows.forEach((item, at) => {
    if (item.kinds.length || !item.anchor || (item.after && item.after.id === state.node)) {
      for (let i = Math.max(0, at - CONTEXT); i <= Math.min(rows.length - 1, at + CONTEXT); i++)
        near[i] = 1;
    }
  });
  const shown = [];
  for (let at = 0; at < rows.length;) {
    if (near[at]) {
      shown.push(rows[at++]);
      continue;
    }
    let end = at;
    while (end < rows.length && !near[end]) end++;
    const key = `${state.compile}/${state.graph}/${state.step}/${rows[at].after.id}`;
    if (end - at < 3 || openGaps.has(key)) shown.push(...rows.slice(at, end));
    else shown.push({ gap: end - at, key });
    at = end;
  }
  return shown;
}

function diffRow(before, after, item) {
  if (item.gap) return el("div", { class: "gap" }, `⋯ ${plural(item.gap, "unchanged node")}`);
  const { before: one, after: other } = item;
  return pairRow(item, DIFF_SIDES, (side) =>
    side === "before"
      ? diffCell(before, one, after, other, side)
      : diffCell(after, other, after, one, side),
  );
}

function diffCell(graph, node, after, twin, side) {
  if (!node) return el("div", { class: "cell none" });
  const kinds = (after.changes.get(node.id) || []).map(([kind]) => kind);
  const changes = after.changes.get(node.id) || [];
  const details = changes.map(([kind, detail]) => `${kind}: ${detail}`).join("\n");
  const retagged = changes.find(([kind]) => kind === "retagged");
  const change = retagged && side === "after" && twin ? retagged[1] : "";
  return el(
    "div",
    {
      class: `cell ${side} ${kinds[0] || ""} ${twin ? "" : "one-side"}`,
      title: details || node.note,
    },
    el("span", { class: "number" }, countText(graph.index.get(node.id) + 1)),
    el(
      "span",
      { class: "sign", "aria-label": kinds.join(", ") },
      kinds.map((kind) => SIGNS[kind]).join(""),
    ),
    codeParts(node, change),
  );
}
