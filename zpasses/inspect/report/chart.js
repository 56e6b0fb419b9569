// Canvases that follow the size of their place, the pixels of the screen, and the colours of the page.

function canvas({ height, draw, label, props }) {
  const element = el("canvas", { class: "chart", tabindex: 0, "aria-label": label, ...props });
  const pen = element.getContext("2d");
  let frame = 0;
  function paint() {
    frame = 0;
    const width = element.clientWidth, scale = window.devicePixelRatio || 1;
    if (!width) return;
    if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
      element.width = Math.round(width * scale);
      element.height = Math.round(height * scale);
    }
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    draw(pen, width, height);
  }
  const later = () => { if (!frame) frame = requestAnimationFrame(paint); };
  element.style.height = `${height}px`;
  new ResizeObserver(later).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  element.repaint = later;
  return element;
}

const FONT = "12px system-ui, sans-serif";

// Round figures for an axis from 0 to `most`, at most `count` of them; of bytes where `base` is 1024.
function ticks(most, count, base = 10) {
  if (!(most > 0)) return [];
  const unit = base === 1024 ? 1024 ** Math.floor(Math.log(most) / Math.log(1024)) : 1;
  const rough = most / unit / count, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * size >= rough) * size * unit;
  const found = [];
  for (let value = 0; value <= most; value += step) found.push(value);
  return found;
}

// A box beside the pointer that says what is there.
const hint = el("div", { class: "hint", role: "status", hidden: true });
function showHint(x, y, ...children) {
  if (!hint.isConnected) document.body.append(hint);
  clear(hint, ...children);
  hint.hidden = false;
  const { width, height } = hint.getBoundingClientRect();
  hint.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  hint.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
}
function hideHint() { hint.hidden = true; }
