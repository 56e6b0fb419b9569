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
  return put(made, ...children);
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

const span = (name, ...children) => el("span", { class: name }, ...children);
const muted = (...children) => span("muted", ...children);
const bar = (...children) => el("div", { class: "bar" }, ...children);
const stretchSpace = () => span("stretch");

// What a view says that has nothing else to show.
const remark = (text) => el("p", { class: "muted pad" }, text);

function button(text, onclick, props) {
  return el("button", { type: "button", onclick, ...props }, text);
}

const linkButton = (text, onclick, props) => button(text, onclick, { class: "link", ...props });
const nodeLink = (node) => linkButton(wrapping(node.name), () => go({ node: node.id }));

function checkBox(text, checked, change, props, title) {
  const onchange = (event) => change(event.target.checked);
  const input = el("input", { type: "checkbox", checked, onchange, ...props });
  return el("label", { title }, input, ` ${text}`);
}

function choice(label, options, change, props) {
  const onchange = (event) => change(event.target.value);
  return el("select", { "aria-label": label, onchange, ...props }, options);
}

const option = (value, selected, text) => el("option", { value, selected }, text);

// A section with a heading. `aside` stands beside the heading.
function card(title, name, aside, ...children) {
  const header = el("header", {}, el("h2", {}, title), aside);
  return el("section", { class: `card ${name}` }, header, ...children);
}

// Columns are [name, title, class]. A row is a list of cells, or an element.
function table(columns, rows, name = "compact") {
  const cell = (content, at) =>
    content instanceof HTMLTableCellElement
      ? content
      : el("td", { class: columns[at][2] }, content);
  const heads = columns.map(([text, title, side]) =>
    el("th", { scope: "col", class: side === "right" && side, title }, text),
  );
  const lines = rows.map((row) => (row instanceof Node ? row : el("tr", {}, row.map(cell))));
  const made = el("table", { class: name }, el("thead", {}, el("tr", {}, heads)));
  return el("div", { class: "scroll" }, put(made, el("tbody", {}, lines)));
}

// Names and what they are: [name, text or parts]. Rows without a text are left out.
function definitions(rows, name) {
  const known = rows.filter(([, text]) => text);
  return el("dl", { class: name }, known.map(([term, text]) => [
    el("dt", {}, term),
    el("dd", {}, [text].flat().map((part) => (typeof part === "string" ? wrapping(part) : part))),
  ]));
}

// A bar of shares of a whole: [color, share from 0 to 1, title].
function stack(label, shares) {
  const part = ([background, share, title]) =>
    el("i", { title, style: { background, width: `${100 * share}%` } });
  return el("div", { class: "stack", role: "img", "aria-label": label }, shares.map(part));
}

const legend = (background, text) => span("legend", el("i", { style: { background } }), text);

const sumOf = (items, pick) => items.reduce((total, each) => total + pick(each), 0);

function digits(size) {
  const text = size.toFixed(Math.abs(size) < 9.995 ? 2 : Math.abs(size) < 99.95 ? 1 : 0);
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

const COUNTS = new Intl.NumberFormat("en");

// 17857 -> "17,857".
const countText = (count) => COUNTS.format(count);

function plural(count, what) {
  return `${countText(count)} ${what}${count === 1 ? "" : "s"}`;
}

// How much a figure changed, in the color of better or worse; null if it hardly did.
function delta(before, after) {
  if (!before || Math.abs(after - before) < before * 5e-4) return null;
  const share = Math.abs((100 * (after - before)) / before).toFixed(1);
  const [sense, sign] = after > before ? ["worse", "+"] : ["better", "−"];
  return el(
    "span",
    { class: `delta ${sense}`, title: "Change from before the passes" },
    `${sign}${share} %`,
  );
}

function someOf(names, most) {
  return names.length > most
    ? `${names.slice(0, most).join(", ")} and ${countText(names.length - most)} more`
    : names.join(", ");
}

const shortPath = (path) => path.split("/").slice(-2).join("/");

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

const kindName = (kind) => `kind-${KINDS.includes(kind) ? kind : "other"}`;
const kindColor = (kind) => `var(--${kindName(kind)})`;
const kindDot = (kind) => el("i", { class: "dot", style: { background: kindColor(kind) } });

function chip(kind, text, title) {
  return el("span", { class: `chip ${kind}`, title }, text);
}

// A name that is cut in its middle if there is no room for it, because its ends distinguish it.
function middleCut(text) {
  if (text.length < 20) return text;
  const end = text.length - Math.min(14, Math.floor(text.length / 2));
  const parts = [span("head", text.slice(0, end)), span("tail", text.slice(end))];
  return el("span", { class: "middle", title: text }, parts);
}

// A long name that may end a line between its parts, and not within one. Parts have 10 characters
// or more, so that a table of names has few elements.
function wrapping(name) {
  const parts = name.match(/.{9,}?[._](?=[^._])|.+$/g) || [];
  return name.length < 24 ? [name] : parts.flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
}

// Code, or a list of names: each long name in it wraps as above.
const wrappingCode = (text) => text.split(/(?<=[\s(),])/).flatMap(wrapping);
