// The small pictures, all of which lead into the walk.

const SMALL_SOURCE = 48; // pixels; a picture with fewer is enlarged as it is, not smoothed

function startThumbs() {
  for (const button of all("button.thumb")) fillThumb(button);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.thumb");
    if (button) walkTo(Number(button.dataset.run), Number(button.dataset.image));
  });
}

const thumbnailOf = (run, image) => report.thumbnails[report.runs[run].thumbnail[image]];

function className(run, number) {
  return number === UNKNOWN ? null : report.runs[run].classes[number];
}

// What is so, and what training was told where that is something else.
function labelOf(run, image) {
  const { truth, label } = report.runs[run];
  const [known, given] = [className(run, truth[image]), className(run, label[image])];
  if (known === null) return given ?? "no label";
  return given === null || given === known ? known : `${known}, labelled ${given}`;
}

function picture(run, image, alt) {
  const element = make("img", { alt, draggable: false });
  element.addEventListener("load", () => element.classList.toggle("small-source", element.naturalWidth < SMALL_SOURCE));
  element.src = thumbnailOf(run, image);
  return element;
}

// A button that says by its data which image it is for: rank and wrong are for those in a strip.
function fillThumb(button, more = "") {
  const { run, image, rank, wrong } = button.dataset;
  const [pool, label] = [report.runs[run], labelOf(run, image)];
  button.title = `${pool.path[image]}: ${label}`;
  button.append(picture(run, image, ""), make("span", { className: "label" }, named(label)));
  if (rank !== undefined) button.append(make("span", { className: "more" }, `rank ${rank}`));
  if (more) button.append(make("span", { className: "more" }, more));
  if (wrong === "yes") {
    const sign = make("span", { className: "sign" }, "×");
    sign.setAttribute("aria-hidden", "true");
    button.append(sign, make("span", { className: "unseen" }, "another class"));
  }
}

function makeThumb(run, image, wrong, more) {
  const button = make("button", { type: "button", className: "thumb" });
  Object.assign(button.dataset, { run, image });
  if (wrong !== null) button.dataset.wrong = wrong ? "yes" : "no";
  fillThumb(button, more);
  return button;
}
