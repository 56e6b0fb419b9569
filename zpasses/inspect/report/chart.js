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
    if (
      element.width !== Math.round(width * scale) ||
      element.height !== Math.round(height * scale)
    ) {
      element.width = Math.round(width * scale);
      element.height = Math.round(height * scale);
    }
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    draw(pen, width, height);
  }
  const later = () => {
    if (!frame) frame = requestAnimationFrame(paint);
  };
  element.style.height = `${height}px`;
  new ResizeObserver(later).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  element.repaint = later;
  return element;
}

const FONT = "12px system-ui, sans-serif";

// Round axis ticks from 0 to `most`, about `count` of them. `base` is 1024 for bytes.
function ticks(most, count, base = 10) {
  if (!(most > 0)) return [];
  const unit = base === 1024 ? 1024 ** Math.floor(Math.log(most) / Math.log(1024)) : 1;
  const rough = most / unit / count,
    size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * size >= rough) * size * unit;
  const found = [];
  for (let value = 0; value <= most; value += step) found.push(value);
  return found;
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
