// Bytes alive along the graph, by kind, and the buffers alive at the node under the pointer.

const MEMORY_LEFT = 64,
  MEMORY_TOP = 16,
  MEMORY_BOTTOM = 22;

function drawMemory(main) {
  const graph = current.graph,
    before = current.before;
  if (!graph) return put(main, notWritten());
  if (!isModelled(current.step)) return put(main, notModelled());
  if (!graph.nodes.length)
    return put(main, el("p", { class: "muted pad" }, "This graph is empty."));
  const { live, byKind, kinds, peak } = graph.curves;
  let at = graph.index.has(state.node) ? graph.index.get(state.node) : peak;
  const earlier = before && before !== graph ? curveOfStepBefore(before, graph) : null;
  const most = Math.max(live[peak], earlier ? maxOf(earlier, 0, earlier.length) : 0) || 1;
  const side = el("div", { class: "alive" });
  const end = Math.max(graph.nodes.length - 1, 1);
  const [from, to] = stretchOf(state.view.nodes, end) || [0, end];
  const view = { from, to };
  if (!graph.index.has(state.node) && (at < from || at > to)) at = Math.round((from + to) / 2);
  const keepStretch = () => keepSoon({ nodes: stretchText(view.from, view.to, end) });
  const chart = canvas({
    height: 320,
    label: "Bytes alive along the graph",
    props: { role: "slider", "aria-valuemin": 1, "aria-valuemax": graph.nodes.length },
    draw: (pen, width, height) =>
      paintMemory(pen, width, height, {
        graph,
        live,
        byKind,
        kinds,
        peak,
        earlier,
        most,
        at,
        view,
      }),
  });
  const show = (next, pinned) => {
    at = Math.max(0, Math.min(graph.nodes.length - 1, next));
    if (at < view.from || at > view.to) {
      const width = view.to - view.from;
      view.from = Math.max(0, Math.min(graph.nodes.length - 1 - width, at - width / 2));
      view.to = view.from + width;
      keepStretch();
    }
    chart.setAttribute("aria-valuenow", at + 1);
    chart.setAttribute(
      "aria-valuetext",
      `${bytesText(live[at])} while ${graph.nodes[at].name} runs`,
    );
    drawAlive(side, graph, at, before !== graph ? before : null);
    chart.repaint();
    if (pinned) go({ node: graph.nodes[at].id });
  };
  const position = (event) => {
    const box = chart.getBoundingClientRect();
    const share = (event.clientX - box.left - MEMORY_LEFT) / (box.width - MEMORY_LEFT - 8);
    return Math.round(view.from + share * (view.to - view.from));
  };
  const zoom = (factor, around = (view.from + view.to) / 2) => {
    const width = Math.min(end, Math.max(8, (view.to - view.from) * factor));
    const share = (around - view.from) / (view.to - view.from || 1);
    view.from = Math.max(0, Math.min(end - width, around - share * width));
    view.to = view.from + width;
    keepStretch();
    chart.repaint();
  };
  chart.addEventListener(
    "wheel",
    (event) => {
      zoom(event.deltaY > 0 ? 1.25 : 0.8, position(event));
      event.preventDefault();
    },
    { passive: false },
  );
  chart.addEventListener("pointermove", (event) => show(position(event)));
  chart.addEventListener("click", (event) => show(position(event), true));
  chart.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(graph.nodes.length / 20));
    const steps = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowUp: 1,
      ArrowDown: -1,
      PageUp: page,
      PageDown: -page,
    };
    if (event.key in steps) show(at + steps[event.key]);
    else if (event.key === "Home") show(0);
    else if (event.key === "End") show(graph.nodes.length - 1);
    else if (event.key === "Enter") show(at, true);
    else if (event.key === "+" || event.key === "=") zoom(0.7, at);
    else if (event.key === "-") zoom(1 / 0.7, at);
    else if (event.key === "0") zoom(Infinity);
    else return;
    event.preventDefault();
  });
  put(
    main,
    current.step.after && runLine(current.step),
    memoryNote(graph, live[peak]),
    el(
      "div",
      { class: "bar" },
      kinds.map((kind) =>
        el(
          "span",
          { class: "legend" },
          el("i", {
            style: { background: `var(--kind-${KINDS.includes(kind) ? kind : "other"})` },
          }),
          kind,
        ),
      ),
      earlier && el("span", { class: "legend" }, el("i", { class: "dashed" }), "before this pass"),
      el("span", { class: "stretch" }),
      button(
        "Peak",
        () => {
          chart.focus();
          show(peak);
        },
        { title: "Go to the peak" },
      ),
      button("−", () => zoom(1 / 0.7), { "aria-label": "Zoom out", title: "Zoom out (-)" }),
      button("+", () => zoom(0.7, at), { "aria-label": "Zoom in", title: "Zoom in (+)" }),
      button("All", () => zoom(Infinity), { title: "Show the whole graph (0)" }),
    ),
    chart,
    side,
  );
  show(at);
}

// What the curve alone does not tell: that the graph never runs, or does not fit into the device.
function memoryNote(graph, most) {
  const { name } = current.data;
  if (isExecuted(name)) {
    const warning = overCapacity(current.compile, name, most);
    if (warning) warning.classList.add("alone");
    return warning;
  }
  return el(
    "p",
    { class: "muted" },
    "This graph never runs: it is split into forward and backward, so this peak never occurs.",
  );
}

// The earlier step's curve, stretched so that nodes which the pass left in their order stand at
// the same place. The values between two of them keep their order, and none is left out: where
// several share a place, the largest is shown.
function curveOfStepBefore(before, graph) {
  const curve = before.curves.live;
  const moved = new Set(((graph.step.diff || {}).moved || []).map(([id]) => id));
  const shown = new Float64Array(graph.nodes.length);
  const stretch = (from, to, first, end) => {
    const count = to - from,
      given = end - first;
    for (let slot = 0; slot < count; slot++) {
      const start = first + Math.floor((slot * given) / count);
      const stop = Math.max(start + 1, first + Math.floor(((slot + 1) * given) / count));
      let most = 0;
      for (let at = start; at < Math.min(stop, curve.length - 1); at++)
        most = Math.max(most, curve[at]);
      shown[from + slot] = given ? most : from + slot ? shown[from + slot - 1] : 0;
    }
  };
  let place = 0,
    earlier = 0;
  graph.nodes.forEach((node, at) => {
    const found = before.index.get(node.id);
    if (found === undefined || moved.has(node.id) || found < earlier) return;
    stretch(place, at, earlier, found);
    // Removed nodes directly before this one have no place of their own.
    const peak = at === place && found > earlier ? maxOf(curve, earlier, found) : 0;
    shown[at] = Math.max(curve[found], peak);
    [place, earlier] = [at + 1, found + 1];
  });
  stretch(place, graph.nodes.length, earlier, before.nodes.length);
  return shown;
}

function maxOf(curve, from, end) {
  let most = 0;
  for (let at = from; at < end; at++) most = Math.max(most, curve[at]);
  return most;
}

function paintMemory(pen, width, height, memory) {
  const { graph, live, byKind, kinds, peak, earlier, most, at, view } = memory;
  const plot = {
    left: MEMORY_LEFT,
    right: width - 8,
    top: MEMORY_TOP,
    bottom: height - MEMORY_BOTTOM,
  };
  const count = graph.nodes.length,
    span = plot.right - plot.left;
  const first = Math.floor(view.from),
    end = Math.min(count, Math.ceil(view.to) + 1);
  const x = (index) => plot.left + ((index - view.from) / (view.to - view.from)) * span;
  const y = (bytes) => plot.bottom - (bytes / most) * (plot.bottom - plot.top);
  pen.font = FONT;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const tick of ticks(most, 5, 1024)) {
    pen.strokeStyle = themeColor("line");
    pen.beginPath();
    pen.moveTo(plot.left, y(tick));
    pen.lineTo(plot.right, y(tick));
    pen.stroke();
    pen.fillStyle = themeColor("muted");
    pen.fillText(bytesText(tick), plot.left - 8, y(tick));
  }
  // At most one column per pixel. Nodes that share a column show their maximum.
  const columns = [];
  const shown = end - first;
  const size = Math.min(shown, Math.max(2, Math.floor(span)));
  for (let column = 0; column < size; column++) {
    const from = first + Math.floor((column / size) * shown),
      to = Math.max(from + 1, first + Math.floor(((column + 1) / size) * shown));
    let best = from;
    for (let index = from; index < to; index++) if (live[index] > live[best]) best = index;
    columns.push(best);
  }
  pen.save();
  pen.beginPath();
  pen.rect(plot.left, 0, span, plot.bottom);
  pen.clip();
  const under = new Float64Array(columns.length);
  for (const kind of kinds) {
    pen.beginPath();
    columns.forEach((index, i) => pen[i ? "lineTo" : "moveTo"](x(index), y(under[i])));
    for (let i = columns.length - 1; i >= 0; i--) {
      under[i] += byKind[kind][columns[i]];
      pen.lineTo(x(columns[i]), y(under[i]));
    }
    pen.closePath();
    pen.fillStyle = themeColor(`kind-${KINDS.includes(kind) ? kind : "other"}`);
    pen.fill();
  }
  if (earlier) {
    pen.beginPath();
    columns.forEach((index, i) => pen[i ? "lineTo" : "moveTo"](x(index), y(earlier[index])));
    pen.strokeStyle = themeColor("text");
    pen.setLineDash([5, 4]);
    pen.lineWidth = 1.5;
    pen.stroke();
    pen.setLineDash([]);
  }
  pen.restore();
  layerMarks(pen, plot, graph, first, end, x);
  if (peak >= view.from && peak <= view.to)
    drawLabel(pen, plot, x(peak), `peak ${bytesText(live[peak])}`, themeColor("text"));
  pen.strokeStyle = themeColor("accent");
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x(at), plot.top);
  pen.lineTo(x(at), plot.bottom);
  pen.stroke();
  pen.fillStyle = themeColor("accent");
  pen.beginPath();
  pen.arc(x(at), y(live[at]), 4, 0, 7);
  pen.fill();
  pen.fillStyle = themeColor("muted");
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  pen.fillText(first ? `node ${countText(first + 1)}` : "first node", plot.left, height - 6);
  pen.textAlign = "right";
  pen.fillText(`node ${countText(end)}`, plot.right, height - 6);
}

// The first node of each numbered layer. Nodes of other layers, or of none, may stand between its
// nodes, as moved collectives do: it begins once.
function layerStarts(graph, first, end) {
  const layers = layersOf(graph);
  const found = new Map();
  for (let at = first; at < end; at++) {
    const layer = layers.get(graph.nodes[at].id);
    if (/\d/.test(layer) && !found.has(layer)) found.set(layer, { at, layer });
  }
  return [...found.values()];
}

// Where each layer begins, as ticks below the curve, with names as far as there is room.
function layerMarks(pen, plot, graph, first, end, x) {
  let free = plot.left + 80;
  pen.strokeStyle = themeColor("muted");
  pen.fillStyle = themeColor("muted");
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  pen.lineWidth = 1;
  for (const { at, layer } of layerStarts(graph, first, end)) {
    const place = x(at);
    pen.beginPath();
    pen.moveTo(place, plot.bottom);
    pen.lineTo(place, plot.bottom + 5);
    pen.stroke();
    const text = layer.split(".").slice(-2).join(".");
    const width = pen.measureText(text).width;
    if (place >= free && place + width < plot.right - 70) {
      pen.fillText(text, place, plot.bottom + 16);
      free = place + width + 16;
    }
  }
}

function drawLabel(pen, plot, at, text, color) {
  pen.fillStyle = color;
  pen.textBaseline = "alphabetic";
  pen.textAlign = at > (plot.left + plot.right) / 2 ? "right" : "left";
  pen.fillText(text, at, plot.top - 4);
}
