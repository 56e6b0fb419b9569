// The schedule: the compute stream, and below it the stream of each process group. Exposed time is
// red: compute waits for a collective.

const TRACK = { left: 108, top: 36, height: 44, gap: 26, between: 8, modules: 18 };

function laneTop(lane) {
  return TRACK.top + TRACK.height + TRACK.gap + lane * (TRACK.height + TRACK.between);
}

function drawTimeline(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  if (!isModelled(current.step)) return put(main, notModelled());
  const plan = graph.step.schedule;
  if (!plan.total) return put(main, remark("The cost model assigns no time to this graph."));
  const { spans, collectives } = graph;
  const stalls = collectives.flatMap((collective) =>
    collective.stalls.map((stall) => ({ ...stall, collective })),
  );
  const groups = [...new Set(collectives.map(({ node }) => node.collective.group))];
  for (const each of collectives) each.lane = groups.indexOf(each.node.collective.group);
  let chosen = null;
  const kept = stretchOf(state.view.time, plan.total);
  const view = zoomable("time", plan.total, plan.total / 1e5, () => chart.repaint());
  const chart = canvas({
    height: laneTop(Math.max(groups.length, 1)) - TRACK.between + 30,
    label:
      `Timeline of ${timeText(plan.total)}, of which ${timeText(plan.exposed)} is exposed. ` +
      "Plus and minus zoom, left and right scroll, up and down select a collective, " +
      "0 shows everything.",
    props: { role: "application" },
    draw: (pen, width, height) =>
      paintTimeline(pen, width, height, { view, stalls, chosen, graph, groups }),
  });
  const scale = () => (chart.clientWidth - TRACK.left - 8) / (view.to - view.from);
  const timeAt = (event) =>
    view.from + (event.clientX - chart.getBoundingClientRect().left - TRACK.left) / scale();
  const hit = (event) => {
    const y = event.clientY - chart.getBoundingClientRect().top,
      time = timeAt(event),
      slack = 2 / scale();
    const inside = (item) => item.start - slack <= time && time <= item.end + slack;
    if (y < TRACK.top) return moduleAt(graph, time);
    if (y < TRACK.top + TRACK.height) {
      const stall = stalls.find((item) => item.start <= time && time <= item.end);
      if (stall) return { stall, id: stall.collective.id };
      const found = spans.findLast((item) => item.start <= time) || spans[0];
      return found && inside(found) ? { span: found, id: found.node.id } : null;
    }
    const collective = collectives.find(
      (item) => inside(item) && y >= laneTop(item.lane) && y <= laneTop(item.lane) + TRACK.height,
    );
    return collective ? { collective, id: collective.id } : null;
  };
  let drag = null;
  view.followWheel(chart, timeAt);
  chart.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = (drag.x - event.clientX) / scale();
      drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
      if (drag.moved) return view.show(drag.from + by, drag.to + by);
    }
    chosen = hit(event);
    chart.repaint();
    if (!chosen) return hideTooltip();
    return showTooltip(event.clientX, event.clientY, ...timelineTooltip(graph, chosen));
  });
  chart.addEventListener("pointerup", (event) => {
    const found = hit(event);
    if (drag && !drag.moved && found && found.id !== undefined) go({ node: found.id });
    drag = null;
  });
  chart.addEventListener("pointerleave", () => {
    chosen = null;
    hideTooltip();
    chart.repaint();
  });
  chart.addEventListener("keydown", (event) => {
    const tenth = { ArrowRight: 0.1, ArrowLeft: -0.1 }[event.key] * (view.to - view.from);
    const next = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (tenth) view.show(view.from + tenth, view.to + tenth);
    else if (next) {
      const at = collectives.findIndex((each) => each.id === state.node) + next;
      if (collectives[at]) go({ node: collectives[at].id });
    } else if (!view.takesKey(event.key)) return;
    event.preventDefault();
  });
  const selected =
    collectives.find((collective) => collective.id === state.node) ||
    spans.find((each) => each.node.id === state.node);
  if (selected && !(kept && selected.end >= kept[0] && selected.start <= kept[1])) {
    const margin = Math.max((selected.end - selected.start) * 4, plan.total / 12);
    view.show(selected.start - margin, selected.end + margin);
  }
  put(
    main,
    current.step.after && runLine(current.step),
    timeBreakdown(plan),
    measuredBreakdown(graph),
    bar(
      legend("var(--compute)", "compute"),
      legend("var(--gather)", "gather"),
      legend("var(--reduce)", "reduce"),
      legend("var(--exposed)", "exposed (compute waits)"),
      stretchSpace(),
      view.buttons(),
    ),
    chart,
    exposedTable(graph, stalls),
    moduleTimes(graph, (from, to) => {
      view.show(from - (to - from) / 50, to + (to - from) / 50);
      chart.scrollIntoView({ block: "nearest" });
    }),
    measuredModules(graph),
    graph.step.measured && joinedNote(current.compile),
  );
}

function hiddenPercent(exposed, communication) {
  return communication ? Math.max(0, Math.round(100 * (1 - exposed / communication))) : 100;
}

function timeBreakdown({ total, compute, exposed, communication }) {
  const starts = total - compute - exposed;
  return el(
    "div",
    { class: "split" },
    el(
      "p",
      {},
      el("b", {}, timeText(total)),
      " estimated: ",
      el("b", {}, timeText(compute)),
      " compute",
      starts > 5e-4 * total ? `, ${timeText(starts)} to start collectives and ` : " and ",
      el("b", { class: "exposed-text" }, timeText(exposed)),
      ` exposed; ${hiddenPercent(exposed, communication)} % of ${timeText(communication)} of ` +
        "communication is hidden.",
    ),
    stack("Shares of compute and exposed communication", [
      ["var(--compute)", compute / total],
      ["var(--exposed)", exposed / total],
    ]),
  );
}

function collectiveColor(node) {
  return themeColor(/reduce|grad/.test(node.collective.kind) ? "reduce" : "gather");
}

// Lanes are called after mesh dimensions, or after process groups, whose names are numbers.
function laneNames(groups, collectives) {
  const numbered = (group) => /^\d+$/.test(group);
  if (!groups.length || (groups.length === 1 && numbered(groups[0]))) return ["communication"];
  const sizes = new Map(
    collectives.map(({ node }) => [node.collective.group, node.collective.ranks]),
  );
  return groups.map(
    (group) => `${numbered(group) ? `group ${group}` : group} (${sizes.get(group)})`,
  );
}

function paintTimeline(pen, width, height, { view, stalls, chosen, graph, groups }) {
  const { spans, collectives } = graph;
  const right = width - 8,
    scale = (right - TRACK.left) / (view.to - view.from),
    bottom = laneTop(Math.max(groups.length, 1)) - TRACK.between;
  const x = (time) => TRACK.left + (time - view.from) * scale;
  writes(pen, "left", "middle", themeColor("muted"));
  pen.fillText("compute", 8, TRACK.top + TRACK.height / 2);
  pen.fillText("module", 8, TRACK.top - 2 - TRACK.modules / 2);
  laneNames(groups, collectives).forEach((name, lane) => {
    const text = name.length > 16 ? `${name.slice(0, 15)}…` : name;
    pen.fillText(text, 8, laneTop(lane) + TRACK.height / 2);
  });
  pen.textAlign = "center";
  for (const tick of ticks(view.to - view.from, 7)) {
    const at = x(view.from + tick);
    line(pen, [[at, TRACK.top], [at, bottom + 6]], themeColor("line"));
    const text = timeText(Number((view.from + tick).toPrecision(4)));
    pen.fillText(text, Math.min(Math.max(at, TRACK.left + 4), right - 24), bottom + 18);
  }
  clip(pen, TRACK.left, 0, right - TRACK.left, height);
  const box = (item, top, color, texts) => {
    if (item.end < view.from || item.start > view.to) return;
    const long = (item.end - item.start) * scale,
      from = x(item.start),
      size = Math.max(1, long - (long > 4 ? 1 : 0)),
      left = Math.max(from, TRACK.left),
      room = Math.min(from + size, right) - left;
    pen.fillStyle = color;
    pen.fillRect(from, top, size, TRACK.height);
    if (room < LEAST_TEXT) return;
    writes(pen, "left", "middle", themeColor("on-fill"));
    pen.fillText(fittingText(pen, texts(), room - 6), left + 3, top + TRACK.height / 2);
  };
  paintModules(pen, x, view, graph);
  const compute = themeColor("compute"),
    exposed = themeColor("exposed");
  for (const each of spans) box(each, TRACK.top, compute, () => [each.node.name]);
  for (const stall of stalls) box(stall, TRACK.top, exposed, () => ["waits", "…"]);
  for (const each of collectives)
    box(each, laneTop(each.lane), collectiveColor(each.node), () => collectiveTexts(each.node));
  const shown = chosen ? chosen.id : state.node;
  const collective = collectives.find((each) => each.id === shown);
  if (collective) drawWaitArrow(pen, x, collective, graph);
  const marked = collective || spans.find((each) => each.node.id === shown);
  if (marked) {
    Object.assign(pen, { strokeStyle: themeColor("text"), lineWidth: 2 });
    const top = collective ? laneTop(collective.lane) : TRACK.top,
      size = Math.max(2, (marked.end - marked.start) * scale);
    pen.strokeRect(x(marked.start), top + 1, size, TRACK.height - 2);
  }
  pen.restore();
}

// Draws a line from a collective to its wait.
function drawWaitArrow(pen, x, collective, graph) {
  const lower = laneTop(collective.lane),
    upper = TRACK.top + TRACK.height,
    middle = lower - TRACK.gap / 2,
    wait = graph.index.get(collective.wait);
  const next = graph.spans.find(({ at }) => at >= wait);
  const stall = collective.stalls[0];
  const time = stall ? stall.end : next ? next.start : collective.end;
  Object.assign(pen, { strokeStyle: themeColor("text"), lineWidth: 1.5 });
  pen.beginPath();
  pen.moveTo(x(collective.end), lower);
  pen.bezierCurveTo(x(collective.end), middle, x(time), middle, x(time), upper);
  pen.stroke();
  dot(pen, x(time), upper, 3, themeColor("text"));
}

function timelineTooltip(graph, found) {
  const { collective, stall, block } = found;
  if (block) return blockTooltip(block);
  if (stall)
    return [
      el("b", {}, `${timeText(stall.end - stall.start)} exposed`),
      el("p", {}, `compute waits for ${stall.collective.node.name}`),
      paramLine(stall.collective.node),
    ];
  if (collective) {
    const { kind, nbytes } = collective.node.collective;
    return [
      el("b", {}, collective.node.name),
      el("p", {}, `${kind}, ${bytesText(nbytes)} of input, ${timeText(collective.time)}`),
      el(
        "p",
        {},
        collective.exposed ? `exposed ${exposedText(collective)}` : "hidden by compute",
        graph.node(collective.wait) ? `; wait ${plural(collective.distance, "node")} later` : "",
      ),
      collective.measured && el("p", {}, `measured ${measuredCollective(collective)}`),
      paramLine(collective.node),
    ];
  }
  const { node, start, end } = found.span;
  const measured = measuredNode(graph, node);
  return [
    el("b", {}, node.name),
    el("p", {}, `${node.target}, ${timeText(end - start)}`),
    measured && el("p", {}, `measured ${measured}`),
    node.source && el("p", {}, wrapping(node.source.module)),
    node.source &&
      el(
        "p",
        { class: "muted" },
        `${shortPath(node.source.file)}:${node.source.line} ${node.source.text}`,
      ),
  ];
}

function paramLine(node, most = 3) {
  if (!node.params.length) return el("p", { class: "muted" }, moduleOfLine(node));
  const rest = node.params.length - most;
  return el(
    "p",
    { class: "muted", title: node.params.join("\n") },
    node.params.slice(0, most).flatMap((name, at) => [at ? ", " : "", ...wrapping(name)]),
    rest > 0 ? ` and ${rest} more` : "",
  );
}

const WAIT_COLUMNS = [
  ["exposed", "Time for which compute waits at this node", "right"],
  ["collective", "The collective that it waits for"],
  ["parameters", "Parameters that the collective carries", "wrap"],
  ["needed by", "The node that waits"],
];

function exposedTable(graph, stalls) {
  if (!stalls.length) return remark("No communication is exposed.");
  const largest = [...stalls].sort((a, b) => b.end - b.start - (a.end - a.start)).slice(0, 12);
  const rows = largest.map(({ collective, at, start, end }) => [
    el("td", { class: "right exposed-text" }, timeText(end - start)),
    nodeLink(collective.node),
    paramLine(collective.node, 1),
    nodeLink(graph.node(at) || collective.node),
  ]);
  return card("Longest waits", "", null, table(WAIT_COLUMNS, rows));
}
