// Helpers for elements and figures. Text from the dump enters the page only as text nodes and
// attributes, so none of it is parsed as markup.

function el(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("aria-")) made.setAttribute(key, String(value));
    else if (value === false) continue;
    else if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style")
      for (const [name, text] of Object.entries(value)) made.style.setProperty(name, text);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  put(made, ...children);
  return made;
}

function put(parent, ...children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return parent;
}

function clear(parent, ...children) {
  parent.replaceChildren();
  return put(parent, ...children);
}

function digits(size) {
  const text =
    Math.abs(size) < 9.995
      ? size.toFixed(2)
      : Math.abs(size) < 99.95
        ? size.toFixed(1)
        : size.toFixed(0);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function bytesText(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = count,
    unit = 0;
  while (Math.abs(size) >= 1023.95 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${size.toFixed(0)} B` : `${digits(size)} ${units[unit]}`;
}

function timeText(us) {
  if (us === 0) return "0";
  if (Math.abs(us) >= 999.5e3) return `${digits(us / 1e6)} s`;
  return Math.abs(us) >= 999.5 ? `${digits(us / 1e3)} ms` : `${digits(us)} µs`;
}

function changeText(before, after) {
  if (before === after) return "=";
  if (before === 0) return "new";
  const share = ((after - before) / before) * 100;
  return `${share >= 0 ? "+" : "−"}${Math.abs(share).toFixed(1)} %`;
}

const COUNTS = new Intl.NumberFormat("en");

// 17857 -> "17,857".
function countText(count) {
  return COUNTS.format(count);
}

function plural(count, what) {
  return `${countText(count)} ${what}${count === 1 ? "" : "s"}`;
}

// The current value of a color of the style sheet, for canvases.
const colorProbe = document.createElement("span");
function themeColor(name) {
  if (!colorProbe.isConnected) {
    colorProbe.hidden = true;
    document.body.append(colorProbe);
  }
  colorProbe.style.color = `var(--${name})`;
  return getComputedStyle(colorProbe).color;
}

function chip(kind, text, title) {
  return el("span", { class: `chip ${kind}`, title }, text);
}

// A name that is cut in its middle if there is no room for it, because its ends distinguish it.
function middleCut(text) {
  if (text.length < 20) return text;
  const tail = Math.min(14, Math.floor(text.length / 2));
  return el(
    "span",
    { class: "middle", title: text },
    el("span", { class: "head" }, text.slice(0, text.length - tail)),
    el("span", { class: "tail" }, text.slice(text.length - tail)),
  );
}

// A long name that may end a line between its parts, and not within one. Parts have 10 characters
// or more, so that a table of names has few elements.
function wrapping(name) {
  const parts = name.match(/.{9,}?[._](?=[^._])|.+$/g) || [];
  return name.length < 24 ? [name] : parts.flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
}

// Code, or a list of names: each long name in it wraps as above.
function wrappingCode(text) {
  return text.split(/(?<=[\s(),])/).flatMap(wrapping);
}

function nodeLink(node) {
  return button(wrapping(node.name), () => go({ node: node.id }), { class: "link" });
}

// The head of a table. Columns are [name, title].
function tableHead(columns, isRight) {
  const cells = columns.map(([name, title], at) =>
    el("th", { scope: "col", class: isRight(at) ? "right" : "", title }, name),
  );
  return el("thead", {}, el("tr", {}, cells));
}

function button(text, onclick, props) {
  return el("button", { type: "button", onclick, ...props }, text);
}
