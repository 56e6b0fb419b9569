// The estimated schedule: the compute stream, and below it the stream of each process group.
// Exposed time is red: compute waits for a collective.

const TRACK = { left: 108, top: 36, height: 44, gap: 26, between: 8, modules: 18 };

function laneTop(lane) {
  return TRACK.top + TRACK.height + TRACK.gap + lane * (TRACK.height + TRACK.between);
}

function drawTimeline(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  if (!isModelled(current.step)) return put(main, notModelled());
  const plan = graph.step.schedule;
  if (!plan.total)
    return put(
      main,
      el("p", { class: "muted pad" }, "The cost model assigns no time to this graph."),
    );
  const spans = graph.spans,
    collectives = graph.collectives;
  const stalls = collectives.flatMap((collective) =>
    collective.stalls.map((stall) => ({ ...stall, collective })),
  );
  const kept = stretchOf(state.view.time, plan.total);
  const view = { from: 0, to: plan.total };
  const groups = [...new Set(collectives.map((collective) => collective.node.collective.group))];
  for (const collective of collectives)
    collective.lane = groups.indexOf(collective.node.collective.group);
  let chosen = null;
  const chart = canvas({
    height: laneTop(Math.max(groups.length, 1)) - TRACK.between + 30,
    label:
      `Timeline of ${timeText(plan.total)}, of which ${timeText(plan.exposed)} is exposed. ` +
      "Plus and minus zoom, left and right scroll, up and down select a collective, " +
      "0 shows everything.",
    props: { role: "application" },
    draw: (pen, width, height) =>
      paintTimeline(pen, width, height, {
        view,
        spans,
        collectives,
        stalls,
        chosen,
        graph,
        groups,
      }),
  });
  const scale = () => (chart.clientWidth - TRACK.left - 8) / (view.to - view.from);
  const timeAt = (clientX) =>
    view.from + (clientX - chart.getBoundingClientRect().left - TRACK.left) / scale();
  const window_ = (from, to) => {
    const width = Math.min(plan.total, Math.max(plan.total / 1e5, to - from));
    view.from = Math.max(0, Math.min(plan.total - width, from));
    view.to = view.from + width;
    keepSoon({ time: stretchText(view.from, view.to, plan.total) });
    chart.repaint();
  };
  const zoom = (factor, around) =>
    window_(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const hit = (event) => {
    const y = event.clientY - chart.getBoundingClientRect().top,
      time = timeAt(event.clientX),
      slack = 2 / scale();
    const inside = (item) => item.start - slack <= time && time <= item.end + slack;
    if (y < TRACK.top) return moduleAt(graph, time);
    if (y < TRACK.top + TRACK.height) {
      const stall = stalls.find(
        (item) => item.end > item.start && item.start <= time && time <= item.end,
      );
      if (stall) return { stall, id: stall.collective.id };
      const span = nearest(spans, time, slack);
      return span && { span, id: span.node.id };
    }
    const collective = collectives.find(
      (item) => inside(item) && y >= laneTop(item.lane) && y <= laneTop(item.lane) + TRACK.height,
    );
    return collective ? { collective, id: collective.id } : null;
  };
  let drag = null;
  chart.addEventListener(
    "wheel",
    (event) => {
      zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, timeAt(event.clientX));
      event.preventDefault();
    },
    { passive: false },
  );
  chart.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = (drag.x - event.clientX) / scale();
      drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
      if (drag.moved) return window_(drag.from + by, drag.to + by);
    }
    const found = hit(event);
    chosen = found;
    chart.repaint();
    return found
      ? showTooltip(event.clientX, event.clientY, ...timelineTooltip(graph, found))
      : hideTooltip();
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
    const width = view.to - view.from,
      middle = (view.from + view.to) / 2;
    if (event.key === "+" || event.key === "=") zoom(0.7, middle);
    else if (event.key === "-") zoom(1 / 0.7, middle);
    else if (event.key === "0") window_(0, plan.total);
    else if (event.key === "ArrowRight") window_(view.from + width / 10, view.to + width / 10);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next =
        collectives[
          collectives.findIndex((collective) => collective.id === state.node) +
            (event.key === "ArrowDown" ? 1 : -1)
        ];
      if (next) go({ node: next.id });
    } else if (event.key === "ArrowLeft") window_(view.from - width / 10, view.to - width / 10);
    else return;
    event.preventDefault();
  });
  const selected =
    collectives.find((collective) => collective.id === state.node) ||
    spans.find((span) => span.node.id === state.node);
  if (kept && !(selected && (selected.end < kept[0] || selected.start > kept[1]))) window_(...kept);
  else if (selected) {
    const margin = Math.max((selected.end - selected.start) * 4, plan.total / 12);
    window_(selected.start - margin, selected.end + margin);
  }
  put(
    main,
    current.step.after && runLine(current.step),
    timeBreakdown(plan),
    measuredBreakdown(graph),
    el(
      "div",
      { class: "bar" },
      el(
        "span",
        { class: "legend" },
        el("i", { style: { background: "var(--compute)" } }),
        "compute",
      ),
      el(
        "span",
        { class: "legend" },
        el("i", { style: { background: "var(--gather)" } }),
        "gather",
      ),
      el(
        "span",
        { class: "legend" },
        el("i", { style: { background: "var(--reduce)" } }),
        "reduce",
      ),
      el(
        "span",
        { class: "legend" },
        el("i", { style: { background: "var(--exposed)" } }),
        "exposed (compute waits)",
      ),
      el("span", { class: "stretch" }),
      button("−", () => zoom(1 / 0.7, (view.from + view.to) / 2), { "aria-label": "Zoom out" }),
      button("+", () => zoom(0.7, (view.from + view.to) / 2), { "aria-label": "Zoom in" }),
      button("All", () => window_(0, plan.total)),
    ),
    chart,
    exposedTable(graph, stalls),
    moduleTimes(graph, (from, to) => {
      window_(from - (to - from) / 50, to + (to - from) / 50);
      chart.scrollIntoView({ block: "nearest" });
    }),
    measuredModules(graph),
    graph.step.measured && joinedNote(current.compile),
  );
}

function nearest(spans, time, slack) {
  let low = 0,
    high = spans.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (spans[middle].start <= time) low = middle;
    else high = middle - 1;
  }
  const found = spans[low];
  return found && found.start - slack <= time && time <= found.end + slack ? found : null;
}

function timeBreakdown(plan) {
  const total = plan.total || 1;
  const hidden = plan.communication
    ? Math.max(0, Math.round(100 * (1 - plan.exposed / plan.communication)))
    : 100;
  return el(
    "div",
    { class: "split" },
    el(
      "p",
      {},
      el("b", {}, timeText(plan.total)),
      " estimated: ",
      el("b", {}, timeText(plan.compute)),
      " compute and ",
      el("b", { class: "exposed-text" }, timeText(plan.exposed)),
      ` exposed; ${hidden} % of ${timeText(plan.communication)} of communication is hidden.`,
    ),
    el(
      "div",
      { class: "stack", role: "img", "aria-label": "Shares of compute and exposed communication" },
      el("i", {
        style: { background: "var(--compute)", width: `${(100 * plan.compute) / total}%` },
      }),
      el("i", {
        style: { background: "var(--exposed)", width: `${(100 * plan.exposed) / total}%` },
      }),
    ),
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

function paintTimeline(
  pen,
  width,
  height,
  { view, spans, collectives, stalls, chosen, graph, groups },
) {
  const right = width - 8,
    scale = (right - TRACK.left) / (view.to - view.from);
  const x = (time) => TRACK.left + (time - view.from) * scale;
  const bottom = laneTop(Math.max(groups.length, 1)) - TRACK.between;
  pen.font = FONT;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.fillStyle = themeColor("muted");
  pen.fillText("compute", 8, TRACK.top + TRACK.height / 2);
  pen.fillText("module", 8, TRACK.top - 2 - TRACK.modules / 2);
  const named = laneNames(groups, collectives);
  named.forEach((name, lane) =>
    pen.fillText(
      name.length > 16 ? `${name.slice(0, 15)}…` : name,
      8,
      laneTop(lane) + TRACK.height / 2,
    ),
  );
  pen.textAlign = "center";
  for (const tick of ticks(view.to - view.from, 7)) {
    const time = view.from + tick;
    pen.strokeStyle = themeColor("line");
    pen.beginPath();
    pen.moveTo(x(time), TRACK.top);
    pen.lineTo(x(time), bottom + 6);
    pen.stroke();
    pen.fillText(
      timeText(Number(time.toPrecision(4))),
      Math.min(Math.max(x(time), TRACK.left + 4), right - 24),
      bottom + 18,
    );
  }
  pen.save();
  pen.beginPath();
  pen.rect(TRACK.left, 0, right - TRACK.left, height);
  pen.clip();
  const seen = (item) => item.end >= view.from && item.start <= view.to;
  const box = (item, top, color, texts) => {
    const from = x(item.start),
      size = Math.max(
        1,
        (item.end - item.start) * scale - (scale * (item.end - item.start) > 4 ? 1 : 0),
      );
    pen.fillStyle = color;
    pen.fillRect(from, top, size, TRACK.height);
    const shown = Math.max(from, TRACK.left),
      room = from + size - shown;
    if (Math.min(room, right - shown) < LEAST_TEXT) return;
    pen.fillStyle = themeColor("on-fill");
    pen.textAlign = "left";
    const text = fittingText(pen, texts, Math.min(room, right - shown) - 6);
    pen.fillText(text, shown + 3, top + TRACK.height / 2);
  };
  paintModules(pen, x, view, graph);
  const compute = themeColor("compute"),
    exposed = themeColor("exposed");
  for (const span of spans) if (seen(span)) box(span, TRACK.top, compute, [span.node.name]);
  for (const stall of stalls)
    if (seen(stall) && stall.end > stall.start) box(stall, TRACK.top, exposed, ["waits", "…"]);
  for (const collective of collectives)
    if (seen(collective))
      box(
        collective,
        laneTop(collective.lane),
        collectiveColor(collective.node),
        collectiveTexts(collective.node),
      );
  const shown = chosen ? chosen.id : state.node;
  const collective = collectives.find((each) => each.id === shown);
  if (collective) drawWaitArrow(pen, x, collective, graph, laneTop(collective.lane));
  const marked = collective || spans.find((span) => span.node.id === shown);
  if (marked) {
    pen.strokeStyle = themeColor("text");
    pen.lineWidth = 2;
    pen.strokeRect(
      x(marked.start),
      (collective ? laneTop(collective.lane) : TRACK.top) + 1,
      Math.max(2, (marked.end - marked.start) * scale),
      TRACK.height - 2,
    );
  }
  pen.restore();
}

// Draws a line from a collective to its wait.
function drawWaitArrow(pen, x, collective, graph, lower) {
  const wait = graph.index.get(collective.wait);
  const next = graph.spans.find((span) => span.at >= wait);
  const stall = collective.stalls[0];
  const time = stall ? stall.end : next ? next.start : collective.end;
  pen.strokeStyle = themeColor("text");
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x(collective.end), lower);
  pen.bezierCurveTo(
    x(collective.end),
    lower - TRACK.gap / 2,
    x(time),
    lower - TRACK.gap / 2,
    x(time),
    TRACK.top + TRACK.height,
  );
  pen.stroke();
  pen.beginPath();
  pen.arc(x(time), TRACK.top + TRACK.height, 3, 0, 7);
  pen.fillStyle = themeColor("text");
  pen.fill();
}

function timelineTooltip(graph, { span, collective, stall, block }) {
  if (block) return blockTooltip(block);
  if (stall)
    return [
      el("b", {}, `${timeText(stall.end - stall.start)} exposed`),
      el("p", {}, `compute waits for ${stall.collective.node.name}`),
      paramLine(stall.collective.node),
    ];
  if (collective) {
    const wait = graph.node(collective.wait);
    return [
      el("b", {}, collective.node.name),
      el(
        "p",
        {},
        `${collective.node.collective.kind}, ` +
          `${bytesText(collective.node.collective.nbytes)} of input, ${timeText(collective.time)}`,
      ),
      el(
        "p",
        {},
        collective.exposed ? `exposed ${exposedText(collective)}` : "hidden by compute",
        wait ? `; wait ${plural(collective.distance, "node")} later` : "",
      ),
      collective.measured && el("p", {}, `measured ${measuredCollective(collective)}`),
      paramLine(collective.node),
    ];
  }
  return [
    el("b", {}, span.node.name),
    el("p", {}, `${span.node.target}, ${timeText(span.end - span.start)}`),
    measuredNode(graph, span.node) && el("p", {}, `measured ${measuredNode(graph, span.node)}`),
    span.node.source && el("p", {}, wrapping(span.node.source.module)),
    span.node.source &&
      el(
        "p",
        { class: "muted" },
        `${shortPath(span.node.source.file)}:${span.node.source.line} ${span.node.source.text}`,
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
  ["exposed", "Time for which compute waits at this node"],
  ["collective", "The collective that it waits for"],
  ["parameters", "Parameters that the collective carries"],
  ["needed by", "The node that waits"],
];

function exposedTable(graph, stalls) {
  const largest = stalls
    .filter((stall) => stall.end > stall.start)
    .sort((a, b) => b.end - b.start - (a.end - a.start))
    .slice(0, 12);
  if (!largest.length) return el("p", { class: "muted pad" }, "No communication is exposed.");
  return el(
    "section",
    { class: "card" },
    el("header", {}, el("h2", {}, "Longest waits")),
    el("div", { class: "scroll" }, el(
      "table",
      { class: "compact" },
      tableHead(WAIT_COLUMNS, (i) => !i),
      el(
        "tbody",
        {},
        largest.map((stall) =>
          el(
            "tr",
            {},
            el("td", { class: "right exposed-text" }, timeText(stall.end - stall.start)),
            el(
              "td",
              {},
              nodeLink(stall.collective.node),
            ),
            el("td", { class: "wrap" }, paramLine(stall.collective.node, 1)),
            el("td", {}, nodeLink(graph.node(stall.at) || stall.collective.node)),
          ),
        ),
      ),
    )),
  );
}
