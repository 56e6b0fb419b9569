// The compile at a glance: estimated costs, and the effect of each pass on each graph.

function drawOverview(main) {
  const compile = current.compile;
  put(
    main,
    failure(compile.error),
    tiles(compile),
    ranksCard(),
    predictedStep(compile),
    joinedNote(compile),
    byInterest(compile.graphs).map((graph) => graphCard(compile, graph)),
    aboutCompile(compile),
  );
}

function tiles(compile) {
  const run = compile.executed.filter((graph) => isExecuted(graph.name));
  if (compile.executed.length && !run.length) return unfinishedTiles(compile);
  const graphs = run.map((graph) => ({
    graph,
    first: graph.steps.find((step) => step.order),
    last: compile.stepWithGraph(graph, compile.last(graph)),
  }));
  if (!graphs.length) return el("p", { class: "muted" }, "This compile wrote no graphs.");
  const sum = (pick) => graphs.reduce((total, each) => total + pick(each), 0);
  const most = (pick) => Math.max(...graphs.map(pick));
  const total = sum((each) => each.last.schedule.total),
    exposed = sum((each) => each.last.schedule.exposed);
  const exposedBefore = sum((each) => each.first.schedule.exposed),
    totalBefore = sum((each) => each.first.schedule.total);
  const communication = sum((each) => each.last.schedule.communication);
  const hidden = Math.max(0, Math.round(100 * (1 - exposed / communication)));
  const peak = most((each) => each.last.peak[0]),
    peakBefore = most((each) => each.first.peak[0]);
  const calls = sum((each) => each.last.schedule.collectives.length),
    callsBefore = sum((each) => each.first.schedule.collectives.length);
  const which =
    graphs.map((each) => each.graph.name).join(" + ") +
    (compile.error ? " of a compile that failed" : "");
  return el(
    "section",
    { class: "tiles", "aria-label": "Summary" },
    tile(
      "Estimated time",
      timeText(total),
      delta(totalBefore, total),
      `${which}, on ${compile.target.name || "the target"}`,
    ),
    tile(
      "Exposed communication",
      timeText(exposed),
      delta(exposedBefore, exposed),
      communication ? `${hidden} % of ${timeText(communication)} is hidden` : "no communication",
    ),
    tile("Peak memory", bytesText(peak), delta(peakBefore, peak), "without shards and inputs"),
    tile(
      "Collectives",
      countText(calls),
      delta(callsBefore, calls),
      `${countText(callsBefore)} before the passes`,
    ),
  );
}

// What is known of a compile that ended before it had a graph that runs: the graph that it ended
// with, as the last pass that succeeded left it.
function unfinishedTiles(compile) {
  const graphs = byInterest(compile.graphs).filter((each) => compile.at(each, compile.last(each)));
  const graph = graphs.find((each) => each.steps.some((step) => step.error)) || graphs[0];
  const step = compile.last(graph);
  const shown = compile.at(graph, step);
  const failed = graph.steps.find((each) => each.error);
  const where = `of ${graph.name}, ${failed ? `before ${failed.after} failed` : stepName(graph.steps[step])}`;
  const passes = compile.graphs.flatMap((each) => each.steps).filter((each) => each.run && !each.error);
  const params = Object.values(compile.parameters);
  const bytes = params.reduce((sum, each) => sum + each[0], 0);
  return [
    el("p", { class: "muted" }, "This compile ended before it had a graph that runs."),
    el(
      "section",
      { class: "tiles", "aria-label": "Summary" },
      tile("Nodes", countText(shown.nodes.length), null, where),
      tile("Collectives", countText(shown.collectives.length), null, where),
      tile("Passes that succeeded", countText(passes.length), null, failed ? `${failed.after} failed` : ""),
      tile("Parameters", countText(params.length), null, `${bytesText(bytes)} in full`),
    ),
  ];
}

function tile(name, figure, change, note) {
  return el(
    "div",
    { class: "tile" },
    el("h3", {}, name),
    el("div", { class: "figure" }, figure, change),
    el("p", {}, note),
  );
}

function delta(before, after) {
  if (!before || Math.abs(after - before) < before * 5e-4) return null;
  return el(
    "span",
    {
      class: `delta ${after > before ? "worse" : "better"}`,
      title: "Change from before the passes",
    },
    changeText(before, after),
  );
}

function graphCard(compile, graph) {
  const last = compile.at(graph, compile.last(graph));
  const peak =
    last &&
    (isExecuted(graph.name)
      ? `peak ${bytesText(last.step.peak[0])}`
      : graph.name === "joint"
        ? "split into forward and backward before it runs"
        : "as Dynamo captured it, no estimates");
  return el(
    "section",
    { class: "card" },
    el(
      "header",
      {},
      el("h2", {}, graph.name),
      graph.of && el("span", { class: "muted" }, `a variant of ${graph.of}`),
      el(
        "span",
        { class: "muted" },
        last
          ? [
              plural(last.nodes.length, "node"),
              plural(last.collectives.length, "collective"),
              peak,
            ].join(" · ")
          : "not in the dump",
      ),
      last && last.nodes.length > 1 && isExecuted(graph.name) && sparkline(last),
    ),
    graph.of && el("p", { class: "measured muted" }, graph.about),
    last && overCapacity(compile, graph.name, last.step.peak[0]),
    graph.prediction && predicted(graph.prediction),
    last && measuredText(last.step.measured),
    (!compile.error || graph.error?.message !== compile.error.message) &&
      failure(graph.error, "A pass failed"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        tableHead(PASS_COLUMNS, (at) => at > 1),
        el(
          "tbody",
          {},
          graph.steps.map((step, at) => stepRow(compile, graph, step, at)),
        ),
      ),
    ),
  );
}

// What a trace says about a graph, beside the prediction.
function measuredText(found) {
  if (!found) return null;
  const pair = (name) => `${timeText(found[name][0])} (predicted ${timeText(found[name][1])})`;
  const rise =
    found.rise &&
    `Memory rises by ${bytesText(found.rise[0])} (predicted ${bytesText(found.rise[1])}).`;
  return el(
    "p",
    { class: "measured" },
    el("b", {}, `Measured in ${plural(found.runs, "run")}: `),
    `${pair("total")}; collectives ${pair("communication")}; exposed ${pair("exposed")}. `,
    rise,
  );
}

const PASS_COLUMNS = [
  ["pass", "The pass and its options, in the order in which they ran"],
  ["changed nodes", "Nodes that differ from the graph before the pass, by kind of change"],
  ["nodes", "Nodes after the pass"],
  ["collectives", "Collectives after the pass"],
  ["peak", "Estimated peak memory after the pass, without shards and inputs"],
  ["exposed", "Estimated time in which compute waits for communication"],
  ["pass time", "Time that the rewrite took"],
  ["checks", "Time that the verification took"],
];

function stepRow(compile, graph, step, at) {
  const stepWithGraph = compile.stepWithGraph(graph, at),
    run = step.run;
  const earlier = compile.before(graph, at),
    there = compile.at(graph, at);
  const changed = step.after && step.same === undefined && step.diff;
  const modelled = isExecuted(graph.name);
  const peak =
    modelled &&
    stepWithGraph.peak &&
    el(
      "span",
      {},
      bytesText(stepWithGraph.peak[0]),
      earlier && delta(earlier.step.peak[0], stepWithGraph.peak[0]),
    );
  const exposed =
    modelled &&
    stepWithGraph.schedule &&
    el(
      "span",
      {},
      timeText(stepWithGraph.schedule.exposed),
      earlier && delta(earlier.step.schedule.exposed, stepWithGraph.schedule.exposed),
    );
  // A pass that failed may have left no graph. What it was given is known.
  const counted = (count) =>
    there
      ? countText(count(there))
      : step.error && earlier
        ? el("span", { class: "muted" }, `${countText(count(earlier))} before`)
        : "";
  const notes =
    run &&
    run.notes.length > 0 &&
    el(
      "tr",
      { class: "notes" },
      el(
        "td",
        { colspan: 8 },
        run.notes.map((note) => el("p", {}, note)),
      ),
    );
  return [
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        button(
          stepName(step),
          () =>
            go({ graph: graph.name, step: at, tab: step.after ? "diff" : "listing", node: null }),
          { class: "link" },
        ),
      ),
      el(
        "td",
        {},
        step.error
          ? [
              chip("removed", step.error.type, step.error.message),
              step.diff && changeChips(step.diff),
            ]
          : changed
            ? changesOf(step)
            : step.after
              ? el("span", { class: "muted" }, "none")
              : "",
      ),
      [
        counted((known) => known.nodes.length),
        counted((known) => known.collectives.length),
        peak,
        exposed,
        run ? timeText(run.time_us) : "",
        run ? timeText(run.check_us) : "",
      ].map((cell) => el("td", { class: "right" }, cell)),
    ),
    notes,
  ];
}

function changesOf(step) {
  const chips = changeChips(step.diff);
  // A dump may lack the metadata that a pass changed, such as recompute marks.
  return chips.length
    ? chips
    : el(
        "span",
        { class: "muted" },
        step.run ? `${plural(step.run.changes, "rewrite")} in metadata` : "none in nodes",
      );
}

function changeChips(diff, inWords = false) {
  return CHANGES.filter((kind) => diff[kind]).map((kind) => {
    const count = countText(diff[kind].length);
    return chip(
      kind,
      inWords ? `${SIGNS[kind]} ${count} ${kind}` : `${SIGNS[kind]}${count}`,
      `${plural(diff[kind].length, "node")} ${kind}`,
    );
  });
}

function sparkline(graph, most = graph.curves.live[graph.curves.peak], width = 160, height = 28) {
  const { live } = graph.curves,
    count = graph.nodes.length;
  const peak = most || 1;
  const points = [];
  for (let x = 0; x <= width; x++) {
    let most = 0;
    const from = Math.floor((x / (width + 1)) * count),
      to = Math.max(from + 1, Math.floor(((x + 1) / (width + 1)) * count));
    for (let at = from; at < to; at++) most = Math.max(most, live[at]);
    points.push(`${x},${(height - (most / peak) * (height - 2)).toFixed(1)}`);
  }
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({
    class: "spark",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": "Memory along the graph",
  }))
    svg.setAttribute(key, value);
  const area = document.createElementNS("http://www.w3.org/2000/svg", "polygon");
  area.setAttribute("points", `0,${height} ${points.join(" ")} ${width},${height}`);
  svg.append(area);
  return svg;
}

function aboutCompile(compile) {
  const params = Object.entries(compile.parameters);
  const total = (place) => params.reduce((sum, [, each]) => sum + each[place], 0);
  const agreements = compile.graphs.flatMap((graph) => graph.agreements);
  const rows = [
    ["pipeline", compile.pipeline || "(none)"],
    ["codegen", compile.codegen],
    [
      "options",
      Object.entries(compile.options)
        .map(([key, value]) => `${key}=${JSON.stringify(value)}`)
        .join(", "),
    ],
    [
      "parameters",
      params.length
        ? `${countText(params.length)}, ${bytesText(total(0))} full, ${bytesText(total(1))} on this rank`
        : "",
    ],
    [
      "groups",
      Object.entries(compile.groups)
        .map(([name, ranks]) => `${name}: ${plural(ranks.length, "rank")}`)
        .join(", "),
    ],
    [
      "agreement",
      agreements
        .map(
          (each) =>
            `${each.graph}, group ${each.label || each.group}: ${each.result}, ` +
            `${plural(each.collectives, "collective")} (${each.digest.slice(0, 12)})`,
        )
        .join("; "),
    ],
    ["runtime notes", (compile.notes || []).join("; ")],
    [
      "target",
      Object.entries(compile.target)
        .filter(([, value]) => value !== "")
        .map(([key, value]) => `${key}=${value}`)
        .join(", "),
    ],
  ];
  return el(
    "section",
    { class: "card about" },
    el("header", {}, el("h2", {}, "About this compile")),
    el(
      "dl",
      {},
      rows
        .filter(([, text]) => text)
        .map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]),
    ),
  );
}
