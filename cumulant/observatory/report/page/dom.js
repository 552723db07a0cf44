// Elements, numbers, hints and files. Strings only ever become text nodes or attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";
const find = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const html = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const shape = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

const known = (value) => typeof value === "number" && Number.isFinite(value);

function show(value, digits = 4) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size < 1e-4 || size >= 1e9))
    text = value.toExponential(Math.max(digits - 2, 0)).replace(/\.?0+e/, "e");
  else if (size >= 1000)
    text = Math.round(value)
      .toString()
      .replace(/\B(?=(\d{3})+$)/g, "\u202f");
  else text = String(Number(value.toPrecision(digits)));
  return text.replace(/-/g, "−");
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function choice(label, options, chosen, choose) {
  const buttons = options.map(([value, text, why]) => {
    const pressed = String(value === chosen);
    const button = html("button", { type: "button", "aria-pressed": pressed, "data-value": value }, text);
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      choose(value);
    });
    if (why) hint(button, () => why);
    return button;
  });
  return html("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

function selector(label, id, options, chosen, choose) {
  const list = html("select", { id, onchange: (event) => choose(event.target.value) });
  for (const [value, text] of options) list.append(html("option", { value }, text));
  list.value = chosen;
  return html("label", {}, html("span", {}, label), list);
}

// what a pointer or the keyboard rests on says more about itself; after a tap, until the next one elsewhere
let hinted = null;
addEventListener("pointerdown", (event) => {
  if (!hinted || hinted.contains(event.target)) return;
  hinted = null;
  find("hint").hidden = true;
});

function hint(node, words) {
  const open = () => {
    hinted = node;
    const box = find("hint");
    box.textContent = words();
    box.hidden = !box.textContent;
    const at = node.getBoundingClientRect();
    const size = box.getBoundingClientRect();
    const left = Math.min(Math.max(at.left + at.width / 2 - size.width / 2, 8), innerWidth - size.width - 8);
    const above = at.top - size.height - 8;
    box.style.left = `${left}px`;
    box.style.top = `${above > 4 ? above : at.bottom + 8}px`;
  };
  const close = (event) => {
    if (event.pointerType === "touch") return;
    hinted = null;
    find("hint").hidden = true;
  };
  node.addEventListener("pointerenter", open);
  node.addEventListener("pointerleave", close);
  node.addEventListener("focus", () => node.matches(":focus-visible") && open());
  node.addEventListener("blur", close);
  return node;
}

function fileName(name, ending) {
  const safe = `${DATA.model ?? "model"}-${name}`.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|-+$/g, "");
  return `${safe}.${ending}`;
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = html("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value); // spreadsheets would run it
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function saveTable(name, header, rows) {
  const lines = [header, ...rows].map((row) => row.map(csvCell).join(","));
  save(fileName(name, "csv"), new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv;charset=utf-8" }));
}

function saveButton(label, act) {
  const attributes = { type: "button", class: "quiet", "aria-label": `Save as ${label}`, onclick: act };
  return html("button", { ...attributes, "data-save": label.toLowerCase() }, label);
}

const PAINT = [
  ...["fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linejoin"],
  ...["opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor"],
];

// a figure on its own has no style sheet: what the page computed is written into every shape
function standalone(figure, title) {
  const copy = figure.cloneNode(true);
  const shapes = [...figure.querySelectorAll("*")];
  const copies = [...copy.querySelectorAll("*")];
  shapes.forEach((from, index) => {
    const style = getComputedStyle(from);
    for (const name of PAINT) copies[index].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "style", "tabindex", "role"]) copies[index].removeAttribute(name);
  });
  copy.setAttribute("xmlns", SVG);
  const paper = getComputedStyle(figure.closest(".figure")).backgroundColor;
  copy.prepend(shape("title", {}, title), shape("rect", { width: "100%", height: "100%", fill: paper }));
  return new XMLSerializer().serializeToString(copy);
}

function saveDrawing(figure, title, name) {
  save(fileName(name, "svg"), new Blob([standalone(figure, title)], { type: "image/svg+xml" }));
}

function savePicture(figure, title, name) {
  const picture = new Image();
  const [width, height] = ["width", "height"].map((side) => Number(figure.getAttribute(side)));
  picture.onload = () => {
    const canvas = html("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => save(fileName(name, "png"), blob), "image/png");
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(figure, title))}`;
}
