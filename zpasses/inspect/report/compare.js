// Any two graphs side by side: of one compile, of two compiles, of two ranks, or of two dumps.

// What the shown graph is compared with: {compile, data, step, graph, why}, or null if there is
// nothing. `why` says why the page took a step that is not after the same pass.
function otherSide() {
  const [compile, name, step] = (state.view.with || "").split("/");
  const chosen = compiles[+compile];
  const data = chosen && name && chosen.graphs.find((each) => each.name === name);
  if (data && step === SAME_PASS) return sideOfCounterpart(chosen, data);
  if (data && data.steps[+step]) return sideOf(chosen, data, +step);
  const lost = state.view.with
    ? `This page has no graph "${state.view.with}" to compare with, so it shows another. `
    : "";
  const found = likeliestSide();
  return found && lost ? { ...found, why: lost + (found.why || "") } : found;
}

function likeliestSide() {
  const others = compiles
    .filter((each) => each !== current.compile)
    .sort((a, b) => closeness(b) - closeness(a));
  for (const each of others) {
    const same = each.graphs.find((graph) => graph.name === state.graph);
    if (same) return sideOfCounterpart(each, same);
  }
  const first = current.data.steps.findIndex((each) => each.order);
  const last = current.compile.last(current.data);
  if (first < 0) return null;
  return sideOf(current.compile, current.data, state.step === first ? last : first);
}

const SAME_PASS = "same"; // in the address, the step that follows the shown one from pass to pass

function sideOfCounterpart(compile, data) {
  const { step, why } = counterpart(current.data, state.step, compile, data);
  return { ...sideOf(compile, data, step), why };
}

// Another dump is the likeliest to compare with, then another rank.
function closeness(compile) {
  const here = current.compile;
  return (
    4 * (compile.dump !== here.dump) +
    2 * (compile.rank !== here.rank) +
    (compile.name === here.name)
  );
}

// The two sides. Of one graph, the earlier step is on the left, so that what passes added is new;
// otherwise the shown graph is. "Swap" exchanges them.
function sidesOfComparison() {
  const shown = sideOf(current.compile, current.data, state.step),
    other = otherSide();
  const isLater = Boolean(
    other && other.compile === shown.compile && other.data === shown.data && other.step < shown.step,
  );
  const onRight = Boolean(other) && isLater !== (state.view.swap === "1");
  return { shown, other, left: onRight ? other : shown, right: onRight ? shown : other };
}

function sideOf(compile, data, step) {
  return { compile, data, step, graph: compile.at(data, step) };
}

function sideName({ compile, data, step }) {
  const where = compiles.length > 1 ? `${compileName(compile)} ` : "";
  return `${where}${data.name}, ${stepName(data.steps[step])}`;
}

function drawCompare(main) {
  const { shown, other, left, right } = sidesOfComparison();
  put(
    main,
    sideChooser(shown, other, left, right),
    other && other.why && el("p", { class: "notice", role: "status" }, other.why),
  );
  if (!shown.graph) return put(main, notWritten());
  if (!other || !other.graph)
    return put(
      main,
      el("p", { class: "muted pad" }, "There is no second graph. Choose one, or add a report."),
    );
  const { pairs, rows } = compared(left.graph, right.graph);
  put(
    main,
    left.compile !== right.compile && stepTotals(left.compile, right.compile),
    isModelled(current.step) && graphFigures(left, right, pairs),
  );
  drawSides(main, left, right, rows, left === shown ? "before" : "after");
}

function sideChooser(shown, other, left, right) {
  const choice = otherChoice(other);
  const name = el("b", {}, sideName(shown));
  return el(
    "div",
    { class: "bar" },
    left === shown ? name : choice,
    right ? "→" : "with",
    left === shown ? choice : name,
    right &&
      button("Swap", () => keepAndRedraw({ swap: state.view.swap === "1" ? "" : "1" }), {
        title: "Exchange the two sides",
      }),
    el("span", { class: "stretch" }),
    addReportField(),
  );
}

function keepAndRedraw(changes) {
  keep(changes);
  redraw();
}

function otherChoice(right) {
  return el(
    "select",
    {
      "aria-label": "Compare with",
      onchange: (event) =>
        keepAndRedraw({ with: event.target.value, other: "", swap: "" }),
    },
    !right && el("option", { value: "" }, "choose a graph"),
    compiles.map((compile, at) =>
      el(
        "optgroup",
        { label: compileName(compile) },
        byInterest(compile.graphs).flatMap((graph) => {
          const isShown = (index) =>
            Boolean(
              right && right.compile === compile && right.data === graph && right.step === index,
            );
          const option = (step, selected, text) =>
            el("option", { value: `${at}/${graph.name}/${step}`, selected }, text);
          const follows = "why" in (right || {}) && isShown(right.step);
          return [
            compile !== current.compile &&
              graph.name === state.graph &&
              option(
                SAME_PASS,
                follows,
                `${sideName(sideOfCounterpart(compile, graph))} (follows the shown pass)`,
              ),
            ...graph.steps.map((step, index) =>
              option(
                index,
                !follows && isShown(index),
                sideName({ compile, data: graph, step: index }),
              ),
            ),
          ];
        }),
      ),
    ),
  );
}

const FIGURES = [
  ["time", (step) => step.schedule.total, timeText],
  ["exposed", (step) => step.schedule.exposed, timeText],
  ["peak", (step) => step.peak[0], bytesText],
  ["collectives", (step) => step.schedule.collectives.length, countText],
];

// The whole step: all graphs that run, of both compiles. A compile that failed lacks some of them, so
// its sums are no step.
function stepTotals(one, other) {
  const names = (compile) => compile.executed.map((graph) => graph.name).join();
  if (names(one) !== names(other)) return null;
  const steps = (compile) =>
    compile.executed.map((graph) => compile.stepWithGraph(graph, compile.last(graph)));
  const sums = (compile, name, pick) => {
    const found = steps(compile).filter((step) => step.order).map(pick);
    return name === "peak" ? Math.max(0, ...found) : found.reduce((sum, value) => sum + value, 0);
  };
  const rows = FIGURES.map(([name, pick, text]) => [
    name,
    sums(one, name, pick),
    sums(other, name, pick),
    text,
  ]);
  const graphs = one.executed.map((each) => each.name).join(" + ");
  const failed = [one, other].filter((compile) => compile.error);
  const card = figureTable(
    `${failed.length ? "Part of a step" : "Whole step"}: ${graphs}`,
    rows,
    [one, other].map(compileName),
  );
  if (failed.length)
    card.append(
      el(
        "p",
        { class: "failed-part" },
        `${failed.map(compileName).join(" and ")} failed` +
          `${failed[0].error.where ? ` in ${failed[0].error.where}` : ""}, ` +
          "so other graphs of the step may be missing.",
      ),
    );
  return card;
}

function graphFigures(left, right, pairs) {
  const rows = FIGURES.map(([name, pick, text]) => [
    name,
    pick(left.graph.step),
    pick(right.graph.step),
    text,
  ]);
  rows.push(["nodes", left.graph.nodes.length, right.graph.nodes.length, countText]);
  const card = figureTable("These two graphs", rows, [sideName(left), sideName(right)]);
  const most = Math.max(left.graph.step.peak[0], right.graph.step.peak[0]);
  card.append(
    el(
      "div",
      { class: "two-curves" },
      [left, right].map((side) =>
        el("figure", {}, sparkline(side.graph, most, 320, 48), el("figcaption", {}, sideName(side))),
      ),
    ),
    peakDelta(left, right, pairs),
  );
  return card;
}

function figureTable(title, rows, names) {
  return el(
    "section",
    { class: "card compared" },
    el("header", {}, el("h2", {}, title)),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            [
              ["figure", "Figures of the cost model"],
              ...names.map((name) => [name, name]),
              ["change", "From the first to the second, relative to the first"],
            ].map(([name, title], at) =>
              el("th", { scope: "col", class: at ? "right" : "", title }, name),
            ),
          ),
        ),
        el(
          "tbody",
          {},
          rows.map(([name, one, other, text]) =>
            el(
              "tr",
              {},
              el("th", { scope: "row" }, name),
              el("td", { class: "right" }, text(one)),
              el("td", { class: "right" }, text(other)),
              el("td", { class: "right" }, one === other ? "=" : delta(one, other) || "≈"),
            ),
          ),
        ),
      ),
    ),
  );
}

// As `_counterparts` of comparison.py: buffers of the same node, kind and parameter; else of the same
// kind for the same parameter; else of the same node and kind, if one of them has no parameter.
function counterparts(own, others) {
  const found = new Map([...own.keys()].filter((key) => others.has(key)).map((key) => [key, key]));
  const pair = (group, alike) => {
    const taken = new Set(found.values()),
      left = new Map();
    for (const key of others.keys()) {
      const name = group(...key.split("/"));
      if (taken.has(key) || !name) continue;
      if (!left.has(name)) left.set(name, []);
      left.get(name).push(key);
    }
    for (const key of own.keys()) {
      const name = found.has(key) ? "" : group(...key.split("/"));
      const free = (name && left.get(name)) || [];
      const at = free.findIndex((each) => alike(key.split("/")[2], each.split("/")[2]));
      if (at >= 0) found.set(key, free.splice(at, 1)[0]);
    }
  };
  pair((_, kind, param) => param && `${kind}/${param}`, () => true);
  pair((number, kind) => `${number}/${kind}`, (mine, other) => !(mine && other));
  return found;
}

// What is alive at one peak and not at the other, as `zpasses/inspect/comparison.py` tells it.
function peakDelta(left, right, pairs) {
  // As `_held` of comparison.py. Of buffers that differ in size, the difference is new or gone.
  const held = (graph, known) => {
    const found = new Map(),
      counts = new Map();
    for (const buffer of graph.alive(graph.curves.peak)) {
      const id = buffer.node.id,
        param = buffer.params.length === 1 ? buffer.params[0] : "",
        key = `${known ? known.get(id) ?? -1 - id : id}/${buffer.kind}/${param}`,
        count = counts.get(key) ?? 0;
      counts.set(key, count + 1);
      found.set(`${key}/${count}`, buffer);
    }
    return found;
  };
  const one = held(left.graph, pairs),
    other = held(right.graph, null);
  const same = counterparts(one, other);
  const inverse = new Map([...same].map(([key, counterpart]) => [counterpart, key]));
  const only = (own, others, known) => {
    const found = [];
    for (const [key, buffer] of own) {
      const more = buffer.nbytes - (known.has(key) ? others.get(known.get(key)).nbytes : 0);
      if (more > 0) found.push({ node: buffer.node, kind: buffer.kind, params: buffer.params, nbytes: more });
    }
    return found.sort((first, second) => second.nbytes - first.nbytes);
  };
  const lists = [
    ["gone at the peak", only(one, other, same), "better"],
    ["new at the peak", only(other, one, inverse), "worse"],
  ];
  return el(
    "div",
    { class: "peak-delta" },
    lists.map(([title, buffers, sense]) =>
      el(
        "div",
        {},
        el(
          "h3",
          {},
          `${title}: `,
          el(
            "span",
            { class: `delta ${sense}` },
            bytesText(buffers.reduce((sum, each) => sum + each.nbytes, 0)),
          ),
        ),
        buffers
          .slice(0, 8)
          .map((each) =>
            el(
              "p",
              { title: each.params.join("\n") },
              el("i", { class: "dot", style: { background: kindColor(each.kind) } }),
              `${bytesText(each.nbytes)} ${each.kind} `,
              middleCut(each.params.length === 1 ? each.params[0] : each.node.name),
            ),
          ),
        buffers.length > 8 && el("p", { class: "muted" }, `and ${countText(buffers.length - 8)} more`),
      ),
    ),
  );
}

function kindColor(kind) {
  return `var(--kind-${KINDS.includes(kind) ? kind : "other"})`;
}

// Both graphs in one list, so that they scroll in step. A selected row selects both nodes.
function drawSides(main, left, right, all, shown) {
  const nodeCount = Math.max(left.graph.nodes.length, right.graph.nodes.length);
  const rows = shownRows(
    isFolded(nodeCount) ? foldSides(left.graph, right.graph, all, shown) : foldUnchanged(all),
  );
  const list = rowList({
    label: "Nodes of both graphs",
    row: (at) =>
      rows[at].fold
        ? foldRow(rows[at], blockNodes, kindChips(rows[at].blocks))
        : sidesRow(left, right, rows[at]),
    pick: (at) => {
      const item = rows[at];
      if (item.fold) {
        toggleFold(item);
        return redraw();
      }
      if (item.gap) {
        openGaps.add(item.key);
        return redraw();
      }
      const own = item[shown],
        its = item.before || item.after;
      keep({ other: own ? "" : String(its.id) });
      return go({ node: own ? own.id : null });
    },
  });
  const count = (kind) => all.filter((item) => item.counted.includes(kind)).length;
  put(
    main,
    el(
      "div",
      { class: "bar" },
      CHANGES.filter(count).map((kind) =>
        chip(kind, `${SIGNS[kind]} ${countText(count(kind))} ${kind}`, `${plural(count(kind), "node")} ${kind}`),
      ),
      !all.some((item) => item.kinds.length) && "The two graphs are equal.",
      el("span", { class: "stretch" }),
      foldSwitch(nodeCount, redraw),
    ),
    sidesHead([sideName(left), sideName(right)], COMPARED_SIDES),
    list.element,
  );
  list.fill(
    rows.length,
    rows.findIndex(
      (item) => !item.gap && state.node !== null && item[shown] && item[shown].id === state.node,
    ),
  );
}

// Both graphs by layer. A node that only one side has stands with the layer that runs there.
function foldSides(one, other, all, shown) {
  const [layers, others] = [layersOf(one), layersOf(other)];
  return withoutUnchanged(
    foldRows(
      all,
      (item) => (item.after ? others.get(item.after.id) : layers.get(item.before.id)),
      `${state.graph}/${state.step}/compare`,
      (item) => Boolean(item[shown]) && item[shown].id === state.node,
    ),
  );
}

const COMPARED_SIDES = ["first", "second"];

// "params: 14 -> 15: with b.weight and 2 more, without a.weight", as difference.py tells it.
function listChange(name, was, now) {
  if (String(was) === String(now)) return "";
  const [old, fresh] = [new Set(was), new Set(now)];
  const some = (word, items) =>
    items.length && `${word} ${items[0]}${items.length > 1 ? ` and ${countText(items.length - 1)} more` : ""}`;
  const parts = [
    some("with", now.filter((item) => !old.has(item))),
    some("without", was.filter((item) => !fresh.has(item))),
  ].filter(Boolean);
  return `${name}: ${countText(was.length)} -> ${countText(now.length)}: ${parts.join(", ") || "in another order"}`;
}

function sidesRow(left, right, item) {
  if (item.gap) return el("div", { class: "gap" }, `⋯ ${plural(item.gap, "equal node")}`);
  const { before, after } = item;
  const retagged =
    before && after && item.kinds.includes("retagged")
      ? listChange("params", before.params, after.params)
      : "";
  const cell = (graph, node, side) => {
    if (!node) return el("div", { class: "cell none" });
    const kinds = item[side === "before" ? "own" : "its"] || item.kinds;
    return el(
      "div",
      {
        class: `cell ${side} ${kinds[0] || ""}`,
        title: [kinds.join(", "), retagged, node.note].filter(Boolean).join("\n"),
      },
      el("span", { class: "number" }, countText(graph.index.get(node.id) + 1)),
      el("span", { class: "sign", "aria-label": kinds.join(", ") }, kinds.map((k) => SIGNS[k])),
      codeParts(node, side === "after" ? retagged : ""),
    );
  };
  return pairRow(item, COMPARED_SIDES, (side) =>
    side === "before" ? cell(left.graph, before, side) : cell(right.graph, after, side),
  );
}
