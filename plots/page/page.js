const tabs = document.querySelectorAll("nav a");
const panels = document.querySelectorAll("main > div");
const by = id => document.getElementById(id);
const all = (of, selector) => [...of.querySelectorAll(selector)];
const SLIDE = "slide-";  // before the place in the address: #slide-ppo_continuous-eq-7
const PICTURE = "-picture";  // after it: the row's picture, which is a slide of its own
let now = null;  // the row that is the slide

// ---- Tabs and slides: the address says what is shown

function go() {
  const hash = decodeURIComponent(location.hash.slice(1)), slides = hash.startsWith(SLIDE);
  const pictured = slides && hash.endsWith(PICTURE);
  const place = by(slides ? hash.slice(SLIDE.length, pictured ? -PICTURE.length : undefined) : hash);
  const shown = place?.closest("main > div") ?? panels[0];
  panels.forEach((panel, k) => {
    panel.hidden = panel !== shown;
    tabs[k].setAttribute("aria-current", panel === shown);
    tabs[k].hash = (slides ? SLIDE : "") + panel.id;
  });
  now?.classList.remove("now", "pictured");
  now = slides ? place?.closest("section") ?? shown.querySelector("section") : null;
  document.body.classList.toggle("slides", slides);
  by("stage").hidden = !slides;
  by("slides").setAttribute("aria-pressed", slides);
  measure();
  if (now) show(all(shown, "section"), pictured);
  else place?.scrollIntoView();
  stretch();
}

function stretch() {  // brackets around a fraction, where no font with tall ones is installed
  for (const bracket of all(document, "mo[stretchy=true]")) {
    bracket.style.transform = "";
    const tall = bracket.parentElement.getBoundingClientRect().height
                 / bracket.getBoundingClientRect().height;
    if (tall > 1.2) bracket.style.transform = `scaleY(${tall})`;
  }
}

function header() {  // what stays above the rows; on a small screen the tabs alone, or nothing
  const [all, tabs] = [document.querySelector("header"), document.querySelector("nav")];
  const bar = getComputedStyle(all).display === "contents" ? tabs : all;
  return getComputedStyle(bar).position === "sticky" || now ? bar.getBoundingClientRect().height : 0;
}

function measure() {
  document.documentElement.style.setProperty("--top", `${header() + 1}px`);
}

function show(rows, pictured) {
  now.classList.add("now");
  now.classList.toggle("pictured", pictured);
  by("count").textContent = `${rows.indexOf(now) + 1} / ${rows.length}`;
  fit();
}

function fit() {  // the largest letters with which nothing scrolls and no line of code breaks
  const columns = [...now.children], least = innerHeight < 900 ? 13 : 16;
  const codes = columns.filter(e => e.matches(".code"));
  const texts = columns.filter(e => !e.matches(".code"));
  const fits = of => [now, ...of].every(e => e.scrollHeight <= e.clientHeight + 1
                                   && e.scrollWidth <= e.clientWidth + 1);
  const whole = () => all(now, ".line").every(line => line.clientHeight < 2.5 * size("--code"));
  const size = name => parseFloat(now.style.getPropertyValue(name));
  const shrink = (name, largest, good) => {
    for (let px = largest; px >= least; px--) {
      now.style.setProperty(name, `${px}px`);
      if (good()) return;
    }
  };
  now.style.setProperty("--code", `${least}px`);
  shrink("--text", Math.max(least, Math.round(innerHeight / 40)), () => fits(texts));
  const good = Math.max(least * 1.15, innerHeight / 45);  // no smaller for a line to stay whole
  shrink("--code", Math.max(least, Math.round(innerHeight / 36)),
         () => (size("--code") <= good || whole()) && fits(codes));
  for (const column of columns) column.tabIndex = fits([column]) ? -1 : 0;  // keys can scroll it
  scrollTo(0, 0);
}

function turn(step, to) {  // past a tab's last row comes the next tab
  const within = to === undefined ? document : now.parentElement;
  const stops = all(within, "main > div > section").flatMap(row => {
    const picture = row.querySelector(".moving:not(:empty)");
    return picture ? [row.id, row.id + PICTURE] : [row.id];
  });
  const at = stops.indexOf(now.id + (now.matches(".pictured") ? PICTURE : ""));
  const k = to ?? Math.min(Math.max(at + step, 0), stops.length - 1);
  location.replace(`#${SLIDE}${stops.at(k)}`);
}

function enter() {
  const top = header();
  const rows = all(document, "main > div:not([hidden]) > section");
  const row = rows.find(each => each.getBoundingClientRect().bottom > top + 40) ?? rows[0];
  location.hash = SLIDE + row.id;
}

function hide() {  // the code, so that a class can think first
  by("hide").setAttribute("aria-pressed", document.body.classList.toggle("hidden"));
}

const leave = () => { location.hash = now.id; };

function scrolls(step) {  // whether a part of the slide has been scrolled instead of turned
  for (const part of [now, ...now.children]) {
    const before = part.scrollTop;
    part.scrollTop += step * innerHeight / 4;
    if (part.scrollTop !== before) return true;
  }
  return false;
}

function press(event) {
  const {key, target} = event;
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]"))
    return;
  if (target.matches("input")) {
    if (key === "Escape") target.blur();
  } else if (key === "Escape") {
    const kept = all(document, ".kept");
    point(null);
    keep(kept, false);
    if (now && !kept.length) leave();
  } else if (key === "s") now ? leave() : enter();
  else if (key === "h") hide();
  else if (now) {
    if (key === " " && target.matches("button, a, summary")) return;
    const steps = {ArrowRight: 1, PageDown: 1, ArrowLeft: -1, PageUp: -1, ArrowDown: 1,
                   ArrowUp: -1, " ": event.shiftKey ? -1 : 1};
    const vertical = key === "ArrowDown" || key === "ArrowUp";
    if (key === "Home") turn(0, 0);
    else if (key === "End") turn(0, -1);
    else if (!(key in steps)) return;
    else if (!(vertical && scrolls(steps[key]))) turn(steps[key]);
    event.preventDefault();
  }
}

// ---- Marks: pointing marks for a moment, a click until the next click or Escape

const same = one => all(one.closest("section"), "[data-s]")
  .filter(each => each.dataset.s === one.dataset.s);

function point(one) {
  for (const old of all(document, ".on")) old.classList.remove("on");
  for (const each of one ? same(one) : []) each.classList.add("on");
}

function keep(marked, kept) {
  for (const each of marked) {
    each.classList.toggle("kept", kept);
    if (each.matches("button")) each.setAttribute("aria-pressed", kept);
  }
}

function hover(event) {  // a finger does not hover, and a mouse's click leaves the focus behind
  if (event.pointerType === "touch") return;
  const focused = document.activeElement.matches(":focus-visible") && document.activeElement;
  const pointed = event.type === "pointerover" && event.target.closest("section [data-s]");
  point(pointed || focused && focused.closest("section [data-s]"));
}

function click(event) {
  const one = event.target.closest("section [data-s]");
  const whole = event.target.closest("[data-whole]");
  if (one) {
    point(null);
    keep(same(one), !one.matches(".kept"));
  } else if (whole) open(whole);
  else if (event.target.closest("#slides")) now ? leave() : enter();
  else if (event.target.closest("#hide")) hide();
  else if (event.target.closest("#back")) turn(-1);
  else if (event.target.closest("#next")) turn(1);
}

function open(button) {  // the whole function, at the lines that the row shows
  const dialog = document.querySelector(`dialog[data-of="${button.dataset.whole}"]`);
  const shown = new Set(all(button.closest("figure"), ".line > i").map(i => i.textContent));
  for (const line of all(dialog, ".line"))
    line.classList.toggle("shown", shown.has(line.firstChild.textContent));
  dialog.showModal();
  dialog.querySelector(".shown").scrollIntoView({block: "center"});
}

// ----

for (const type of ["pointerover", "focusin", "focusout"]) document.addEventListener(type, hover);
document.addEventListener("click", click);
document.addEventListener("keydown", press);
document.addEventListener("pointerup", event => {  // then keys turn slides again
  if (now && event.target.matches("input")) event.target.blur();
});
document.addEventListener("toggle", () => { if (now) fit(); }, true);
addEventListener("hashchange", go);
addEventListener("load", go);  // once more: pictures may have changed the heights
addEventListener("beforeprint", () => {
  for (const panel of panels) panel.hidden = false;
  stretch();
});
addEventListener("afterprint", go);
addEventListener("resize", () => { measure(); if (now) fit(); });
by("slides").hidden = by("hide").hidden = false;
go();
