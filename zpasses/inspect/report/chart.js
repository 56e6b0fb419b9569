// Canvases that follow their container's size, the device's pixel ratio and the page's theme.

function canvas({ height, draw, label, props }) {
  const element = el("canvas", { class: "chart", tabindex: 0, "aria-label": label, ...props });
  const pen = element.getContext("2d");
  let frame = 0;
  function paint() {
    frame = 0;
    const width = element.clientWidth,
      scale = window.devicePixelRatio || 1;
    if (!width) return;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (element.width !== size[0] || element.height !== size[1])
      [element.width, element.height] = size;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    draw(pen, width, height);
  }
  element.repaint = () => {
    if (!frame) frame = requestAnimationFrame(paint);
  };
  element.style.height = `${height}px`;
  new ResizeObserver(element.repaint).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", element.repaint);
  return element;
}

// The stretch of a chart from 0 to `end` that is shown. The address keeps it under `key`.
function zoomable(key, end, least, changed) {
  const [from, to] = stretchOf(state.view[key], end) || [0, end];
  const view = { from, to };
  view.show = (from, to) => {
    const width = Math.min(end, Math.max(least, to - from));
    view.from = Math.max(0, Math.min(end - width, from));
    view.to = view.from + width;
    keepSoon({ [key]: stretchText(view.from, view.to, end) });
    changed();
  };
  view.zoom = (factor, around = (view.from + view.to) / 2) =>
    view.show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  view.all = () => view.show(0, end);
  // `placeOf` maps a pointer's event to a place from 0 to `end`.
  view.followWheel = (chart, placeOf) =>
    chart.addEventListener(
      "wheel",
      (event) => {
        view.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, placeOf(event));
        event.preventDefault();
      },
      { passive: false },
    );
  // Whether a key zooms.
  view.takesKey = (key, around) => {
    if (key === "+" || key === "=") view.zoom(0.7, around);
    else if (key === "-") view.zoom(1 / 0.7, around);
    else if (key === "0") view.all();
    else return false;
    return true;
  };
  view.buttons = (around = () => undefined) => [
    button("−", () => view.zoom(1 / 0.7), { "aria-label": "Zoom out", title: "Zoom out (-)" }),
    button("+", () => view.zoom(0.7, around()), { "aria-label": "Zoom in", title: "Zoom in (+)" }),
    button("All", view.all, { title: "Show the whole graph (0)" }),
  ];
  return view;
}

// Draws a line through points.
function line(pen, points, color, width = 1) {
  pen.strokeStyle = color;
  pen.lineWidth = width;
  pen.beginPath();
  points.forEach(([x, y], at) => pen[at ? "lineTo" : "moveTo"](x, y));
  pen.stroke();
}

function dot(pen, x, y, radius, color) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 7);
  pen.fillStyle = color;
  pen.fill();
}

function clip(pen, left, top, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width, height);
  pen.clip();
}

function writes(pen, align, baseline, color) {
  Object.assign(pen, { textAlign: align, textBaseline: baseline, fillStyle: color });
}

// Round axis ticks from 0 to `most`, about `count` of them. `base` is 1024 for bytes.
function ticks(most, count, base = 10) {
  if (!(most > 0)) return [];
  const unit = base === 1024 ? 1024 ** Math.floor(Math.log(most) / Math.log(1024)) : 1;
  const rough = most / unit / count,
    size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * size >= rough) * size * unit;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, at) => at * step);
}

// The tooltip beside the pointer.
const tooltip = el("div", { class: "tooltip", role: "status", hidden: true });
function showTooltip(x, y, ...children) {
  if (!tooltip.isConnected) document.body.append(tooltip);
  clear(tooltip, ...children);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  tooltip.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
}
function hideTooltip() {
  tooltip.hidden = true;
}
