// Bytes alive along the graph, by kind, and the buffers alive at the node under the pointer.

const MEMORY_LEFT = 64,
  MEMORY_TOP = 16,
  MEMORY_BOTTOM = 22;

function drawMemory(main) {
  const graph = current.graph,
    before = current.before === current.graph ? null : current.before;
  if (!graph) return put(main, notWritten());
  if (!isModelled(current.step)) return put(main, notModelled());
  if (!graph.nodes.length) return put(main, remark("This graph is empty."));
  const { live, kinds, peak } = graph.curves;
  const count = graph.nodes.length,
    end = Math.max(count - 1, 1);
  const earlier = before && curveOfStepBefore(before, graph);
  const most = Math.max(live[peak], earlier ? maxOf(earlier, 0, earlier.length) : 0) || 1;
  const side = el("div", { class: "alive" });
  const view = zoomable("nodes", end, 8, () => chart.repaint());
  let at = graph.index.get(state.node) ?? peak;
  if (!graph.index.has(state.node) && (at < view.from || at > view.to))
    at = Math.round((view.from + view.to) / 2);
  const chart = canvas({
    height: 320,
    label: "Bytes alive along the graph",
    props: { role: "slider", "aria-valuemin": 1, "aria-valuemax": count },
    draw: (pen, width, height) =>
      paintMemory(pen, width, height, { graph, earlier, most, at, view }),
  });
  const show = (next, pinned) => {
    at = Math.max(0, Math.min(count - 1, next));
    const half = (view.to - view.from) / 2;
    if (at < view.from || at > view.to) view.show(at - half, at + half);
    const name = graph.nodes[at].name;
    chart.setAttribute("aria-valuenow", at + 1);
    chart.setAttribute("aria-valuetext", `${bytesText(live[at])} while ${name} runs`);
    drawAlive(side, graph, at, before);
    chart.repaint();
    if (pinned) go({ node: graph.nodes[at].id });
  };
  const position = (event) => {
    const box = chart.getBoundingClientRect();
    const share = (event.clientX - box.left - MEMORY_LEFT) / (box.width - MEMORY_LEFT - 8);
    return Math.round(view.from + share * (view.to - view.from));
  };
  view.followWheel(chart, position);
  chart.addEventListener("pointermove", (event) => show(position(event)));
  chart.addEventListener("click", (event) => show(position(event), true));
  chart.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(count / 20));
    const steps = {
      ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1, PageUp: page, PageDown: -page,
      Home: -count, End: count,
    };
    if (event.key in steps) show(at + steps[event.key]);
    else if (event.key === "Enter") show(at, true);
    else if (!view.takesKey(event.key, at)) return;
    event.preventDefault();
  });
  const toPeak = () => {
    chart.focus();
    show(peak);
  };
  put(
    main,
    current.step.after && runLine(current.step),
    memoryNote(graph),
    bar(
      kinds.map((kind) => legend(kindColor(kind), kind)),
      earlier && span("legend", el("i", { class: "dashed" }), "before this pass"),
      stretchSpace(),
      button("Peak", toPeak, { title: "Go to the peak" }),
      view.buttons(() => at),
    ),
    chart,
    side,
  );
  show(at);
}

// What the curve alone does not tell: that the graph never runs, or does not fit into the device.
function memoryNote(graph) {
  const { name } = current.data;
  if (isExecuted(name)) return overCapacity(graph.step, "over alone");
  const why = "it is split into forward and backward, so this peak never occurs.";
  return el("p", { class: "muted" }, `This graph never runs: ${why}`);
}

// The earlier step's curve, stretched so that nodes which the pass left in their order stand at
// the same place. The values between two of them keep their order, and none is left out: where
// several share a place, the largest is shown.
function curveOfStepBefore(before, graph) {
  const curve = before.curves.live;
  const moved = graph.moved;
  const shown = new Float64Array(graph.nodes.length);
  const stretch = (from, to, first, end) => {
    const count = to - from,
      given = end - first;
    for (let slot = 0; slot < count; slot++) {
      const start = first + Math.floor((slot * given) / count);
      const stop = Math.max(start + 1, first + Math.floor(((slot + 1) * given) / count));
      const most = maxOf(curve, start, Math.min(stop, curve.length - 1));
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

function paintMemory(pen, width, height, { graph, earlier, most, at, view }) {
  const { live, byKind, kinds, peak } = graph.curves;
  const left = MEMORY_LEFT,
    right = width - 8,
    top = MEMORY_TOP,
    bottom = height - MEMORY_BOTTOM,
    room = right - left;
  const first = Math.floor(view.from),
    end = Math.min(graph.nodes.length, Math.ceil(view.to) + 1);
  const x = (index) => left + ((index - view.from) / (view.to - view.from)) * room;
  const y = (bytes) => bottom - (bytes / most) * (bottom - top);
  for (const tick of ticks(most, 5, 1024)) {
    line(pen, [[left, y(tick)], [right, y(tick)]], themeColor("line"));
    writes(pen, "right", "middle", themeColor("muted"));
    pen.fillText(bytesText(tick), left - 8, y(tick));
  }
  // At most one column per pixel. Nodes that share a column show their maximum.
  const columns = [];
  const shown = end - first;
  const size = Math.min(shown, Math.max(2, Math.floor(room)));
  for (let column = 0; column < size; column++) {
    const from = first + Math.floor((column / size) * shown),
      to = Math.max(from + 1, first + Math.floor(((column + 1) / size) * shown));
    let best = from;
    for (let index = from; index < to; index++) if (live[index] > live[best]) best = index;
    columns.push(best);
  }
  clip(pen, left, 0, room, bottom);
  const under = new Float64Array(columns.length);
  for (const kind of kinds) {
    pen.beginPath();
    columns.forEach((index, i) => pen[i ? "lineTo" : "moveTo"](x(index), y(under[i])));
    for (let i = columns.length - 1; i >= 0; i--) {
      under[i] += byKind[kind][columns[i]];
      pen.lineTo(x(columns[i]), y(under[i]));
    }
    pen.closePath();
    pen.fillStyle = themeColor(kindName(kind));
    pen.fill();
  }
  pen.setLineDash([5, 4]);
  if (earlier)
    line(pen, columns.map((index) => [x(index), y(earlier[index])]), themeColor("text"), 1.5);
  pen.restore();
  layerMarks(pen, { left, right, bottom }, graph, first, end, x);
  if (peak >= view.from && peak <= view.to) {
    const side = x(peak) > (left + right) / 2 ? "right" : "left";
    writes(pen, side, "alphabetic", themeColor("text"));
    pen.fillText(`peak ${bytesText(live[peak])}`, x(peak), top - 4);
  }
  line(pen, [[x(at), top], [x(at), bottom]], themeColor("accent"), 1.5);
  dot(pen, x(at), y(live[at]), 4, themeColor("accent"));
  writes(pen, "left", "alphabetic", themeColor("muted"));
  pen.fillText(first ? `node ${countText(first + 1)}` : "first node", left, height - 6);
  pen.textAlign = "right";
  pen.fillText(`node ${countText(end)}`, right, height - 6);
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
function layerMarks(pen, { left, right, bottom }, graph, first, end, x) {
  let free = left + 80;
  writes(pen, "left", "alphabetic", themeColor("muted"));
  for (const { at, layer } of layerStarts(graph, first, end)) {
    const place = x(at);
    line(pen, [[place, bottom], [place, bottom + 5]], themeColor("muted"));
    const text = layer.split(".").slice(-2).join(".");
    const width = pen.measureText(text).width;
    if (place >= free && place + width < right - 70) {
      pen.fillText(text, place, bottom + 16);
      free = place + width + 16;
    }
  }
}
