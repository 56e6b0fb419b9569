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

// Tiles are [name, figure, change, note].
function summary(tiles) {
  const tile = ([name, figure, change, note]) =>
    el(
      "div",
      { class: "tile" },
      el("h3", {}, name),
      el("div", { class: "figure" }, figure, change),
      el("p", {}, note),
    );
  return el("section", { class: "tiles", "aria-label": "Summary" }, tiles.map(tile));
}

function tiles(compile) {
  const graphs = compile.executed.filter((graph) => isExecuted(graph.name));
  if (!graphs.length)
    return compile.executed.length
      ? unfinishedTiles(compile)
      : el("p", { class: "muted" }, "This compile wrote no graphs.");
  const firsts = graphs.map((graph) => graph.steps.find((step) => step.order));
  const lasts = graphs.map((graph) => compile.stepWithGraph(graph, compile.last(graph)));
  const both = (pick) => [sumOf(firsts, pick), sumOf(lasts, pick)];
  const time = both((step) => step.schedule.total),
    exposed = both((step) => step.schedule.exposed),
    calls = both((step) => step.schedule.launches),
    peak = [firsts, lasts].map((steps) => Math.max(...steps.map((step) => step.peak[0])));
  const communication = sumOf(lasts, (step) => step.schedule.communication);
  const hidden = `${hiddenPercent(exposed[1], communication)} % of ${timeText(communication)}`;
  const which =
    graphs.map((graph) => graph.name).join(" + ") +
    (compile.error ? " of a compile that failed" : "");
  return summary([
    [
      "Estimated time",
      timeText(time[1]),
      delta(...time),
      `${which}, on ${compile.target.name || "the target"}`,
    ],
    [
      "Exposed communication",
      timeText(exposed[1]),
      delta(...exposed),
      communication ? `${hidden} is hidden` : "no communication",
    ],
    ["Peak memory", bytesText(peak[1]), delta(...peak), "without shards and inputs"],
    ["Collectives", countText(calls[1]), delta(...calls), `${countText(calls[0])} before the passes`],
  ]);
}

// What is known of a compile that ended before it had a graph that runs: the graph that it ended
// with, as the last pass that succeeded left it.
function unfinishedTiles(compile) {
  const graphs = byInterest(compile.graphs).filter((each) => compile.at(each, compile.last(each)));
  const graph = graphs.find((each) => each.steps.some((step) => step.error)) || graphs[0];
  const step = compile.last(graph);
  const shown = compile.at(graph, step);
  const failed = graph.steps.find((each) => each.error);
  const when = failed ? `before ${failed.after} failed` : stepName(graph.steps[step]);
  const where = `of ${graph.name}, ${when}`;
  const steps = compile.graphs.flatMap((each) => each.steps);
  const passes = steps.filter((each) => each.run && !each.error).length;
  const params = Object.values(compile.parameters);
  const bytes = sumOf(params, (each) => each[0]);
  return [
    el("p", { class: "muted" }, "This compile ended before it had a graph that runs."),
    summary([
      ["Nodes", countText(shown.nodes.length), null, where],
      ["Collectives", countText(shown.step.schedule.launches), null, where],
      ["Passes that succeeded", countText(passes), null, failed ? `${failed.after} failed` : ""],
      ["Parameters", countText(params.length), null, `${bytesText(bytes)} in full`],
    ]),
  ];
}

function graphCard(compile, graph) {
  const last = compile.at(graph, compile.last(graph));
  const runs = isExecuted(graph.name);
  const peak =
    last && runs
      ? `peak ${bytesText(last.step.peak[0])}`
      : graph.name === "joint"
        ? "split into forward and backward before it runs"
        : "as Dynamo captured it, no estimates";
  const counts =
    last &&
    [plural(last.nodes.length, "node"), plural(last.step.schedule.launches, "collective"), peak];
  return card(
    graph.name,
    "",
    [
      graph.of && muted(`a variant of ${graph.of}`),
      muted(last ? counts.join(" · ") : "not in the dump"),
      last && last.nodes.length > 1 && runs && sparkline(last),
    ],
    graph.of && el("p", { class: "measured muted" }, graph.about),
    last && overCapacity(last.step),
    graph.prediction && predicted(graph.prediction),
    last && measuredText(last.step.measured),
    (!compile.error || graph.error?.message !== compile.error.message) &&
      failure(graph.error, "A pass failed"),
    table(
      PASS_COLUMNS,
      graph.steps.flatMap((step, at) => stepRows(compile, graph, step, at)),
      "passes",
    ),
  );
}

const PASS_COLUMNS = [
  ["pass", "The pass and its options, in the order in which they ran"],
  ["changed nodes", "Nodes that differ from the graph before the pass, by kind of change"],
  ["nodes", "Nodes after the pass", "right"],
  ["collectives", "Collectives after the pass", "right"],
  ["peak", "Estimated peak memory after the pass, without shards and inputs", "right"],
  ["exposed", "Estimated time in which compute waits for communication", "right"],
  ["pass time", "Time that the rewrite took", "right"],
  ["checks", "Time that the verification took", "right"],
];

function stepRows(compile, graph, step, at) {
  const stepWithGraph = compile.stepWithGraph(graph, at),
    run = step.run,
    earlier = compile.before(graph, at),
    there = compile.at(graph, at);
  const figure = (pick, text) =>
    isExecuted(graph.name) &&
    stepWithGraph.order &&
    [text(pick(stepWithGraph)), earlier && delta(pick(earlier.step), pick(stepWithGraph))];
  // A pass that failed may have left no graph. What it was given is known.
  const counted = (count) =>
    there
      ? countText(count(there))
      : step.error && earlier && muted(`${countText(count(earlier))} before`);
  const tab = step.after ? "diff" : "listing";
  const changed = step.after && step.same === undefined && step.diff;
  const changes = step.error
    ? [chip("removed", step.error.type, step.error.message), step.diff && changeChips(step.diff)]
    : changed
      ? changesOf(step)
      : step.after && muted("none");
  const show = () => go({ graph: graph.name, step: at, tab, node: null });
  const name = linkButton(stepName(step), show);
  const notes = run ? run.notes.map((note) => el("p", {}, note)) : [];
  const noteCell = el("td", { colspan: PASS_COLUMNS.length }, notes);
  return [
    [
      el("th", { scope: "row" }, name),
      changes,
      counted((known) => known.nodes.length),
      counted((known) => known.step.schedule.launches),
      figure(({ peak }) => peak[0], bytesText),
      figure(({ schedule }) => schedule.exposed, timeText),
      run && timeText(run.time_us),
      run && timeText(run.check_us),
    ],
    ...(notes.length ? [el("tr", { class: "notes" }, noteCell)] : []),
  ];
}

function changesOf(step) {
  const chips = changeChips(step.diff);
  if (chips.length) return chips;
  // A dump may lack the metadata that a pass changed, such as recompute marks.
  return muted(step.run ? `${plural(step.run.changes, "rewrite")} in metadata` : "none in nodes");
}

function changeChips(diff, inWords = false) {
  const changed = CHANGES.filter((kind) => diff[kind]);
  return changed.map((kind) => countChip(kind, diff[kind].length, inWords));
}

function countChip(kind, count, inWords = true) {
  const text = inWords ? ` ${countText(count)} ${kind}` : countText(count);
  return chip(kind, SIGNS[kind] + text, `${plural(count, "node")} ${kind}`);
}

function sparkline(graph, most = graph.curves.live[graph.curves.peak], width = 160, height = 28) {
  const { live } = graph.curves,
    count = graph.nodes.length;
  const points = [];
  for (let x = 0; x <= width; x++) {
    const from = Math.floor((x / (width + 1)) * count),
      to = Math.max(from + 1, Math.floor(((x + 1) / (width + 1)) * count)),
      share = maxOf(live, from, to) / (most || 1);
    points.push(`${x},${(height - share * (height - 2)).toFixed(1)}`);
  }
  const svg = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const about = { role: "img", "aria-label": "Memory along the graph" };
  const frame = { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, ...about };
  const area = { points: `0,${height} ${points.join(" ")} ${width},${height}` };
  return put(svg("svg", frame), svg("polygon", area));
}

function aboutCompile(compile) {
  const params = Object.values(compile.parameters);
  const bytes = (place) => bytesText(sumOf(params, (each) => each[place]));
  const joined = (object, text) => Object.entries(object).map(text).join(", ");
  const agreement = ({ graph, label, group, result, collectives, digest }) =>
    `${graph}, group ${label || group}: ${result}, ` +
    `${plural(collectives, "collective")} (${digest.slice(0, 12)})`;
  const target = Object.fromEntries(
    Object.entries(compile.target).filter(([, value]) => value !== ""),
  );
  const rows = [
    ["pipeline", compile.pipeline || "(none)"],
    ["codegen", compile.codegen],
    ["options", joined(compile.options, ([key, value]) => `${key}=${JSON.stringify(value)}`)],
    [
      "parameters",
      params.length && `${countText(params.length)}, ${bytes(0)} full, ${bytes(1)} on this rank`,
    ],
    ["groups", joined(compile.groups, ([name, { length }]) => `${name}: ${plural(length, "rank")}`)],
    ["agreement", compile.graphs.flatMap((graph) => graph.agreements).map(agreement).join("; ")],
    ["runtime notes", (compile.notes || []).join("; ")],
    ["target", joined(target, ([key, value]) => `${key}=${value}`)],
  ];
  return card("About this compile", "about", null, definitions(rows));
}
