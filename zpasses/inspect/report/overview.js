// The whole compile on one page: what it would take, and what each pass did to each graph.

function drawOverview(main) {
  const compile = current.compile;
  put(main,
    failure(compile.error),
    tiles(compile),
    compile.graphs.map((graph) => graphCard(compile, graph)),
    aboutCompile(compile));
}

function failure(error, where) {
  if (!error) return null;
  return el("section", { class: "failure", role: "alert" },
    el("h2", {}, `${where || "This compile failed"}${error.where ? ` in ${error.where}` : ""}`),
    el("p", {}, `${error.type}: ${error.message}`),
    error.traceback && el("details", {}, el("summary", {}, "Traceback"), el("pre", {}, error.traceback)));
}

function tiles(compile) {
  const graphs = compile.running.map((graph) => ({ graph, first: graph.steps.find((step) => step.order), last: compile.holder(graph, compile.last(graph)) }));
  if (!graphs.length) return el("p", { class: "muted" }, "No graph was written.");
  const sum = (pick) => graphs.reduce((total, each) => total + pick(each), 0);
  const most = (pick) => Math.max(...graphs.map(pick));
  const total = sum((each) => each.last.schedule.total), exposed = sum((each) => each.last.schedule.exposed);
  const exposedBefore = sum((each) => each.first.schedule.exposed), totalBefore = sum((each) => each.first.schedule.total);
  const moved = sum((each) => each.last.schedule.communication);
  const peak = most((each) => each.last.peak[0]), peakBefore = most((each) => each.first.peak[0]);
  const calls = sum((each) => each.last.schedule.flights.length), callsBefore = sum((each) => each.first.schedule.flights.length);
  const which = graphs.map((each) => each.graph.name).join(" + ");
  return el("section", { class: "tiles", "aria-label": "Summary" },
    tile("Estimated time", timeText(total), delta(totalBefore, total), `${which}, on ${compile.target.name || "its target"}`),
    tile("Exposed communication", timeText(exposed), delta(exposedBefore, exposed), moved ? `${Math.max(0, Math.round(100 * (1 - exposed / moved)))} % of ${timeText(moved)} hides` : "there is none"),
    tile("Peak memory", bytesText(peak), delta(peakBefore, peak), "above shards and batch, by the liveness model"),
    tile("Collectives", calls.toLocaleString("en"), delta(callsBefore, calls), `from ${callsBefore.toLocaleString("en")} before bucketing and overlap`));
}

function tile(name, figure, change, note) {
  return el("div", { class: "tile" }, el("h3", {}, name), el("div", { class: "figure" }, figure, change), el("p", {}, note));
}

function delta(before, after) {
  if (!before || Math.abs(after - before) < before * 5e-4) return null;
  return el("span", { class: `delta ${after > before ? "worse" : "better"}`, title: "Against the graphs before the passes of their level" }, changeText(before, after));
}

function graphCard(compile, graph) {
  const last = compile.at(graph, compile.last(graph));
  const peak = last && (isModelled(last.step) ? `peak ${bytesText(last.step.peak[0])}` : "memory and times are not modelled");
  return el("section", { class: "card" },
    el("header", {},
      el("h2", {}, graph.name),
      graph.of && el("span", { class: "muted" }, `a variant of ${graph.of}`),
      el("span", { class: "muted" }, last ? `${plural(last.nodes.length, "node")} · ${plural(last.flights.length, "collective")} · ${peak}` : "not written"),
      last && last.nodes.length > 1 && isModelled(last.step) && sparkline(last)),
    (!compile.error || graph.error?.message !== compile.error.message) && failure(graph.error, "A pass failed"),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["pass", "what changed", "nodes", "collectives", "peak", "exposed", "pass took", "checks"].map((name, at) =>
        el("th", { scope: "col", class: at > 1 ? "right" : "" }, name)))),
      el("tbody", {}, graph.steps.map((step, at) => stepRow(compile, graph, step, at))))));
}

function stepRow(compile, graph, step, at) {
  const holder = compile.holder(graph, at), run = step.run;
  const earlier = compile.before(graph, at), there = compile.at(graph, at);
  const changed = step.after && step.same === undefined && step.diff;
  const modelled = isModelled(step);
  const peak = modelled && holder.peak && el("span", {}, bytesText(holder.peak[0]), earlier && delta(earlier.step.peak[0], holder.peak[0]));
  const exposed = modelled && holder.schedule && el("span", {}, timeText(holder.schedule.exposed), earlier && delta(earlier.step.schedule.exposed, holder.schedule.exposed));
  const notes = run && run.notes.length > 0 && el("tr", { class: "notes" }, el("td", { colspan: 8 }, run.notes.map((note) => el("p", {}, note))));
  return [el("tr", {},
    el("th", { scope: "row" }, button(stepName(step), () => go({ graph: graph.name, step: at, tab: step.after ? "diff" : "listing", node: null }), { class: "link" })),
    el("td", {}, step.error ? chip("removed", step.error.type, step.error.message) : changed ? changesOf(step) : step.after ? el("span", { class: "muted" }, "nothing") : ""),
    [there ? there.nodes.length.toLocaleString("en") : "", there ? there.flights.length.toLocaleString("en") : "", peak, exposed,
      run ? timeText(run.time_us) : "", run ? timeText(run.check_us) : ""].map((cell) => el("td", { class: "right" }, cell))), notes];
}

function changesOf(step) {
  const chips = changeChips(step.diff);
  // Dumps of earlier versions do not hold marks for the partitioner (what to compute again).
  return chips.length ? chips : el("span", { class: "muted" }, step.run ? `${plural(step.run.changes, "mark")}, no node` : "no node");
}

function changeChips(diff, inWords = false) {
  return CHANGES.filter((kind) => diff[kind]).map((kind) => {
    const count = diff[kind].length;
    return chip(kind, inWords ? `${SIGNS[kind]} ${count} ${kind}` : `${SIGNS[kind]}${count}`, `${plural(count, "node")} ${kind}`);
  });
}

function sparkline(graph) {
  const { live } = graph.curves, width = 160, height = 28, count = graph.nodes.length;
  const peak = Math.max(...live) || 1;
  const points = [];
  for (let x = 0; x <= width; x++) {
    let most = 0;
    const from = Math.floor(x / (width + 1) * count), to = Math.max(from + 1, Math.floor((x + 1) / (width + 1) * count));
    for (let at = from; at < to; at++) most = Math.max(most, live[at]);
    points.push(`${x},${(height - most / peak * (height - 2)).toFixed(1)}`);
  }
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Memory along the graph" })) svg.setAttribute(key, value);
  const area = document.createElementNS("http://www.w3.org/2000/svg", "polygon");
  area.setAttribute("points", `0,${height} ${points.join(" ")} ${width},${height}`);
  svg.append(area);
  return svg;
}

function aboutCompile(compile) {
  const params = Object.entries(compile.parameters);
  const agreements = compile.graphs.flatMap((graph) => graph.agreements);
  const rows = [
    ["pipeline", compile.pipeline || "(none)"],
    ["codegen", compile.codegen],
    ["options", Object.entries(compile.options).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ")],
    ["parameters", params.length ? `${params.length}, ${bytesText(params.reduce((sum, [, each]) => sum + each[0], 0))} full, ${bytesText(params.reduce((sum, [, each]) => sum + each[1], 0))} on this rank` : ""],
    ["groups", Object.entries(compile.groups).map(([name, ranks]) => `${name}: ${plural(ranks.length, "rank")}`).join(", ")],
    ["agreement", agreements.map((each) => `${each.graph}, group ${each.group}: ${each.verdict} on ${plural(each.collectives, "collective")} (${each.digest.slice(0, 12)})`).join("; ")],
    ["when it ran", (compile.notes || []).join("; ")],
    ["target", Object.entries(compile.target).filter(([, value]) => value !== "").map(([key, value]) => `${key}=${value}`).join(", ")],
  ];
  return el("section", { class: "card about" }, el("header", {}, el("h2", {}, "About this compile")),
    el("dl", {}, rows.filter(([, text]) => text).map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));
}
