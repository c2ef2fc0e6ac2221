// The images as points: drawn on a canvas, moved by pointer, wheel, fingers and keys.

const COLOURS = ["#4e79a7", "#f28e2b", "#d1495b", "#59a14f", "#b07aa1", "#9c755f", "#c9a227", "#2a9d8f", "#ee8fa0", "#7a8f3c"];
const OUTLINES = [circle, square, triangle, diamond, cross];
const NOT_KNOWN = { colour: "#8b949e", outline: circle };
const GOOD = { colour: "#4e79a7", outline: circle };
const MIXED = { colour: "#c9a227", outline: square };
const BAD = { colour: "#d1495b", outline: cross };
const [RADIUS, REACH, PICTURE] = [3.5, 14, 30]; // pixels
const FARTHEST_IN = 80;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const maps = [];

function startMaps() {
  for (const section of all("section.map")) maps.push(new ImageMap(section, Number(section.dataset.run)));
}

const redrawMaps = () => maps.forEach((map) => map.draw());

// Each class has a colour; where those run out, an outline of its own as well.
function styleOf(number) {
  return { colour: COLOURS[number % COLOURS.length], outline: OUTLINES[Math.floor(number / COLOURS.length) % OUTLINES.length] };
}

// The ways to colour a pool's points: for every image the kind it is of, and the kinds with their names and styles.
function colourings(run) {
  const { truth, label, wrong, split, classes } = report.runs[run];
  const kinds = [...classes.map((name, number) => ({ name, ...styleOf(number) })), { name: "not known", ...NOT_KNOWN }];
  const kindOf = (numbers) => numbers.map((number) => (number === UNKNOWN ? classes.length : number));
  const parts = [...new Set(split)];
  const labelled = truth.some((number) => number !== UNKNOWN);
  const mislabelled = wrong.some(Boolean);
  const found = [];
  if (labelled) found.push({ title: "class", kinds, of: kindOf(truth) });
  if (labelled) found.push({ title: "classes of the nearest", ...byNearest(run) });
  if (!labelled || mislabelled) found.push({ title: "label given", kinds, of: kindOf(label) });
  if (mislabelled) found.push({ title: "wrong labels", ...byLabel(wrong) });
  if (parts.length > 1) found.push({ title: "part", kinds: parts.map((name, number) => ({ name, ...styleOf(number) })), of: split.map((name) => parts.indexOf(name)) });
  return found;
}

function byNearest(run) {
  const { truth, near } = report.runs[run];
  const kinds = [{ name: "all of its class", ...GOOD }, { name: "some of another", ...MIXED }, { name: "all of another", ...BAD }, { name: "not known", ...NOT_KNOWN }];
  const of = near.map((others, image) => {
    const known = others.map(([other]) => differ(truth, image, other)).filter((different) => different !== null);
    const wrong = known.filter(Boolean).length;
    if (known.length === 0) return 3;
    return wrong === 0 ? 0 : wrong < known.length ? 1 : 2;
  });
  return { kinds, of };
}

function byLabel(wrong) {
  const kinds = [{ name: "right", ...GOOD }, { name: "wrong", ...BAD }, { name: "not known", ...NOT_KNOWN }];
  const of = wrong.map((one) => (one === null ? 2 : Number(one)));
  return { kinds, of };
}

class ImageMap {
  constructor(section, run) {
    this.section = section;
    this.run = run;
    this.pool = report.runs[run];
    this.canvas = section.querySelector(".map-box canvas");
    this.tip = section.querySelector(".tip");
    this.colourings = colourings(run);
    this.pictures = new Map();
    this.pointers = new Map();
    this.placed = []; // the images that have a place on the map
    this.current = null; // the one under the pointer or the keys
    this.listen();
    this.control("colour").append(...this.colourings.map(({ title }, number) => make("option", { value: number }, title)));
    this.chooseColouring();
    this.chooseProjection();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  control(role) {
    return this.section.querySelector(`[data-role="${role}"]`);
  }

  listen() {
    const on = (role, event, act) => this.control(role).addEventListener(event, act);
    on("projection", "change", () => this.chooseProjection());
    on("colour", "change", () => this.chooseColouring());
    on("pictures", "change", () => this.draw());
    on("in", "click", () => this.zoom(1.6));
    on("out", "click", () => this.zoom(1 / 1.6));
    on("whole", "click", () => this.showAll());
    on("all", "click", () => this.checkAll(true));
    on("none", "click", () => this.checkAll(false));
    on("items", "change", () => this.readLegend());
    this.canvas.addEventListener("keydown", (event) => this.pressed(event));
    this.canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.touched(event));
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerup", (event) => this.released(event));
    this.canvas.addEventListener("pointercancel", (event) => this.forget(event));
    this.canvas.addEventListener("pointerleave", () => this.pointers.size || this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
  }

  // What is shown

  chooseProjection() {
    const { x, y } = this.pool.projections[this.control("projection").value];
    this.x = x;
    this.y = y;
    this.placed = x.map((_, image) => image).filter((image) => x[image] !== null && y[image] !== null);
    const range = (values) => this.placed.reduce(([low, high], image) => [Math.min(low, values[image]), Math.max(high, values[image])], [Infinity, -Infinity]);
    this.bounds = { x: range(x), y: range(y) };
    this.showAll();
  }

  chooseColouring() {
    this.colouring = this.colourings[this.control("colour").value] ?? { title: "images", kinds: [{ name: "all", ...GOOD }], of: this.pool.path.map(() => 0) };
    const count = this.colouring.kinds.map(() => 0);
    for (const kind of this.colouring.of) count[kind] += 1;
    this.section.querySelector(".legend legend").textContent = this.colouring.title[0].toUpperCase() + this.colouring.title.slice(1);
    const present = this.colouring.kinds.map((kind, number) => ({ kind, number })).filter(({ number }) => count[number] > 0);
    this.control("items").replaceChildren(...present.map(({ kind, number }) => this.legendItem(kind, number, count[number])));
    this.readLegend();
  }

  legendItem(kind, number, count) {
    const box = make("input", { type: "checkbox", checked: true, value: number });
    const sample = make("canvas", { width: 32, height: 32 });
    sample.setAttribute("aria-hidden", "true");
    const pen = sample.getContext("2d");
    pen.scale(2, 2);
    drawOutline(pen, kind, 8, 8, 5);
    return make("label", {}, box, sample, named(kind.name), make("span", { className: "count" }, count.toLocaleString("en")));
  }

  checkAll(checked) {
    for (const box of all("input", this.control("items"))) box.checked = checked;
    this.readLegend();
  }

  readLegend() {
    this.shownKinds = new Set(all("input:checked", this.control("items")).map((box) => Number(box.value)));
    this.point(null);
  }

  shown() {
    return this.placed.filter((image) => this.shownKinds.has(this.colouring.of[image]));
  }

  // Where things are: the middle of the canvas shows `centre`, and `magnified` of 1 shows everything.

  showAll() {
    const middle = ([low, high]) => (low + high) / 2;
    this.centre = { x: middle(this.bounds.x), y: middle(this.bounds.y) };
    this.magnified = 1;
    this.draw();
  }

  get scale() {
    const room = ([low, high], side) => (0.92 * side) / Math.max(high - low, 1e-9);
    return this.magnified * Math.min(room(this.bounds.x, this.canvas.clientWidth), room(this.bounds.y, this.canvas.clientHeight));
  }

  onCanvas(image) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = this.scale;
    return [(this.x[image] - this.centre.x) * scale + width / 2, (this.centre.y - this.y[image]) * scale + height / 2];
  }

  pan(right, down) {
    this.centre.x -= right / this.scale;
    this.centre.y += down / this.scale;
    this.draw();
  }

  zoom(factor, [across, along] = [this.canvas.clientWidth / 2, this.canvas.clientHeight / 2]) {
    const [right, down] = [across - this.canvas.clientWidth / 2, along - this.canvas.clientHeight / 2];
    const before = this.scale;
    this.magnified = clamp(this.magnified * factor, 0.5, FARTHEST_IN);
    const kept = 1 / before - 1 / this.scale; // what is under the pointer stays there
    this.centre.x += right * kept;
    this.centre.y -= down * kept;
    this.draw();
  }

  // Drawing

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return; // of a run that is not shown
    const density = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * density);
    this.canvas.height = Math.round(height * density);
    const pen = this.canvas.getContext("2d");
    pen.scale(density, density);
    const style = getComputedStyle(this.canvas);
    pen.globalAlpha = 0.85;
    const pictures = this.control("pictures").checked;
    for (const image of this.shown()) {
      const [x, y] = this.onCanvas(image);
      if (x < -PICTURE || y < -PICTURE || x > width + PICTURE || y > height + PICTURE) continue;
      if (pictures) this.drawPicture(pen, image, x, y);
      else drawOutline(pen, this.colouring.kinds[this.colouring.of[image]], x, y, RADIUS);
    }
    pen.globalAlpha = 1;
    if (this.current !== null) this.drawRing(pen, style);
    this.showTip(width, height);
  }

  drawPicture(pen, image, x, y) {
    const element = this.pictures.get(image) ?? this.loadPicture(image);
    const half = PICTURE / 2;
    if (element.complete && element.naturalWidth) pen.drawImage(element, x - half, y - half, PICTURE, PICTURE);
    pen.lineWidth = 2;
    pen.strokeStyle = this.colouring.kinds[this.colouring.of[image]].colour;
    pen.strokeRect(x - half, y - half, PICTURE, PICTURE);
  }

  loadPicture(image) {
    const element = picture(this.run, image, "");
    element.addEventListener("load", () => this.drawSoon());
    this.pictures.set(image, element);
    return element;
  }

  drawSoon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  drawRing(pen, style) {
    const [x, y] = this.onCanvas(this.current);
    pen.beginPath();
    pen.arc(x, y, RADIUS + 5, 0, 2 * Math.PI);
    pen.lineWidth = 2.5;
    pen.strokeStyle = style.color;
    pen.stroke();
  }

  // The one that is pointed at

  point(image) {
    const changed = image !== this.current;
    this.current = image;
    if (changed && image !== null) {
      this.tip.replaceChildren(picture(this.run, image, ""), named(labelOf(this.run, image)));
    }
    this.draw();
  }

  showTip(width, height) {
    this.tip.hidden = this.current === null;
    if (this.current === null) return;
    const [x, y] = this.onCanvas(this.current);
    const { offsetWidth: across, offsetHeight: along } = this.tip;
    const right = x + 14 + across > width ? x - 14 - across : x + 14;
    this.tip.style.left = `${clamp(right, 4, Math.max(4, width - across - 4))}px`;
    this.tip.style.top = `${clamp(y - along / 2, 4, Math.max(4, height - along - 4))}px`;
  }

  nearestTo(x, y, within = Infinity, allowed = () => true) {
    let [best, least] = [null, within];
    for (const image of this.shown()) {
      const [right, down] = this.onCanvas(image);
      const distance = Math.hypot(right - x, down - y);
      if (distance < least && allowed(image, right - x, down - y)) [best, least] = [image, distance];
    }
    return best;
  }

  // Keys

  pressed(event) {
    const act = this.actionOf(event.key);
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  actionOf(key) {
    if (key in ARROWS) return () => this.pointTowards(...ARROWS[key]);
    if (key === "Enter") return () => this.current !== null && walkTo(this.run, this.current);
    if (key === "+" || key === "=") return () => this.zoom(1.6);
    if (key === "-") return () => this.zoom(1 / 1.6);
    if (key === "0") return () => this.showAll();
    return null;
  }

  // To the nearest that is more to that side than to any other; without one to start from, to the one in the middle.
  pointTowards(right, down) {
    const [x, y] = this.current === null ? [this.canvas.clientWidth / 2, this.canvas.clientHeight / 2] : this.onCanvas(this.current);
    const there = (image, across, along) => {
      const ahead = across * right + along * down;
      return image !== this.current && ahead > 0 && ahead >= Math.abs(across * down - along * right);
    };
    const next = this.current === null ? this.nearestTo(x, y) : this.nearestTo(x, y, Infinity, there);
    if (next === null) return;
    this.point(next);
    this.bringIntoView(next);
    this.control("spoken").textContent = `${labelOf(this.run, next)}, ${this.pool.path[next]}`;
  }

  bringIntoView(image) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const [x, y] = this.onCanvas(image);
    const margin = 24;
    this.pan(clamp(x, margin, width - margin) - x, clamp(y, margin, height - margin) - y);
  }

  // Pointers: one moves, two zoom. A page that is scrolled past is not caught: the wheel needs the map to have been clicked.

  wheeled(event) {
    if (document.activeElement !== this.canvas && !event.ctrlKey) return;
    event.preventDefault();
    this.zoom(Math.exp(-clamp(event.deltaY, -240, 240) / 300), [event.offsetX, event.offsetY]);
  }

  touched(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.travelled = this.pointers.size > 1 ? Infinity : 0;
  }

  moved(event) {
    const here = [event.offsetX, event.offsetY];
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.point(this.nearestTo(...here, REACH));
    this.pointers.set(event.pointerId, here);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    if (others.length > 0) return this.pinch(before, here, others[0]);
    this.travelled += Math.hypot(here[0] - before[0], here[1] - before[1]);
    this.canvas.classList.add("dragging");
    return this.pan(here[0] - before[0], here[1] - before[1]);
  }

  pinch(before, here, other) {
    const apart = ([x, y]) => Math.hypot(x - other[0], y - other[1]);
    if (apart(before) < 1) return;
    this.zoom(apart(here) / apart(before), [(here[0] + other[0]) / 2, (here[1] + other[1]) / 2]);
  }

  released(event) {
    this.forget(event);
    if (this.travelled > 5) return;
    const image = this.nearestTo(event.offsetX, event.offsetY, REACH);
    if (image !== null) walkTo(this.run, image);
  }

  forget(event) {
    this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("dragging");
  }
}

function drawOutline(pen, { colour, outline }, x, y, radius) {
  pen.beginPath();
  outline(pen, x, y, radius);
  if (outline === cross) {
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.stroke();
  } else {
    pen.fillStyle = colour;
    pen.fill();
  }
}

function circle(pen, x, y, radius) {
  pen.arc(x, y, radius, 0, 2 * Math.PI);
}

function square(pen, x, y, radius) {
  pen.rect(x - 0.9 * radius, y - 0.9 * radius, 1.8 * radius, 1.8 * radius);
}

function triangle(pen, x, y, radius) {
  polygon(pen, [[x, y - 1.2 * radius], [x + 1.1 * radius, y + 0.8 * radius], [x - 1.1 * radius, y + 0.8 * radius]]);
}

function diamond(pen, x, y, radius) {
  polygon(pen, [[x, y - 1.3 * radius], [x + 1.3 * radius, y], [x, y + 1.3 * radius], [x - 1.3 * radius, y]]);
}

function cross(pen, x, y, radius) {
  pen.moveTo(x - radius, y - radius);
  pen.lineTo(x + radius, y + radius);
  pen.moveTo(x + radius, y - radius);
  pen.lineTo(x - radius, y + radius);
}

function polygon(pen, corners) {
  corners.forEach(([x, y], number) => (number === 0 ? pen.moveTo(x, y) : pen.lineTo(x, y)));
  pen.closePath();
}
