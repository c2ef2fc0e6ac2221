// From an image to its nearest, and on from there. The way is in the address (#walk-RUN-IMAGE.IMAGE…), so that the
// browser's own back and forward go along it.

const LONGEST_TRAIL = 30;
const SURELY_KEPT = 40; // browsers forget entries of a history that has more than 50

function startWalk() {
  const dialog = byId("walk");
  byId("walk-back").addEventListener("click", stepBack);
  byId("walk-close").addEventListener("click", leave);
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault();
    leave();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) leave(); // beside it
  });
  window.addEventListener("popstate", showWalk);
  showWalk();
}

function readTrail(hash) {
  const found = /^#walk-(\d+)-(\d+(?:\.\d+)*)$/.exec(hash);
  if (!found) return null;
  const run = Number(found[1]);
  const images = found[2].split(".").map(Number);
  const there = report.runs[run]?.path.length ?? 0;
  return images.every((image) => image < there) ? { run, images } : null;
}

const writeTrail = (run, images) => `#walk-${run}-${images.slice(-LONGEST_TRAIL).join(".")}`;

// How many entries of the history belong to this walk; an address that somebody was sent has none.
const stepsTaken = () => history.state?.steps ?? 0;

function walkTo(run, image) {
  const before = readTrail(location.hash);
  const images = before?.run === run ? before.images : [];
  goTo(run, [...images, image]);
}

function goTo(run, images) {
  history.pushState({ steps: stepsTaken() + 1 }, "", writeTrail(run, images));
  showWalk();
}

function stepBack() {
  if (stepsTaken() > 1) return history.back();
  const { run, images } = readTrail(location.hash);
  history.replaceState(history.state, "", writeTrail(run, images.slice(0, -1)));
  return showWalk();
}

function leave() {
  if (stepsTaken() > 0 && stepsTaken() < SURELY_KEPT) return history.go(-stepsTaken());
  history.replaceState(null, "", location.href.replace(/#.*/, ""));
  return showWalk();
}

function showWalk() {
  const dialog = byId("walk");
  const trail = readTrail(location.hash);
  if (!trail) return dialog.open && dialog.close();
  const image = trail.images.at(-1);
  fillWalk(trail.run, image);
  byId("walk-trail").replaceChildren(...trail.images.map((_, place) => crumb(trail, place)));
  byId("walk-back").disabled = trail.images.length < 2;
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  return byId("walk-title").focus();
}

function fillWalk(run, image) {
  const pool = report.runs[run];
  byId("walk-title").replaceChildren(named(labelOf(run, image)));
  const large = picture(run, image, pool.path[image]);
  large.id = "walk-image";
  byId("walk-image").replaceWith(large);
  byId("walk-facts").replaceChildren(...facts(run, image));
  byId("walk-note").textContent = pool.exact[image]
    ? "By cosine similarity, among all training images."
    : "By cosine similarity, among the training images on this page.";
  byId("walk-near").replaceChildren(...pool.near[image].map(([other, similarity]) => nearThumb(run, image, other, similarity)));
}

function facts(run, image) {
  const pool = report.runs[run];
  const known = [
    ["Path", pool.path[image]],
    ["Part", pool.split[image]],
    ["Class", className(run, pool.truth[image]) ?? "not known"],
    ["Label given", className(run, pool.label[image]) ?? "none"],
  ];
  return known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, named(value))));
}

function nearThumb(run, image, other, similarity) {
  return makeThumb(run, other, differ(report.runs[run].truth, image, other), similarity === null ? "" : similarity.toFixed(3));
}

// Whether two images are of different classes; null where one of them is not known.
function differ(truth, one, other) {
  return truth[one] === UNKNOWN || truth[other] === UNKNOWN ? null : truth[one] !== truth[other];
}

function crumb({ run, images }, place) {
  const label = `Step ${place + 1}: ${labelOf(run, images[place])}`;
  const button = make("button", { type: "button", title: label }, picture(run, images[place], label));
  if (place === images.length - 1) button.setAttribute("aria-current", "step");
  else button.addEventListener("click", () => goTo(run, images.slice(0, place + 1)));
  return button;
}
