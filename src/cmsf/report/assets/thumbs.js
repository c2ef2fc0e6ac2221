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

// What is so, or else what training was told.
function classOf(run, image) {
  const { truth, label } = report.runs[run];
  return className(run, truth[image]) ?? className(run, label[image]) ?? "no label";
}

// What training was told, where that is not so.
function wrongLabelOf(run, image) {
  const { wrong, label } = report.runs[run];
  return wrong[image] ? `labelled ${className(run, label[image])}` : null;
}

const labelOf = (run, image) => [classOf(run, image), wrongLabelOf(run, image)].filter(Boolean).join(", ");

function picture(run, image, alt) {
  const element = make("img", { alt, draggable: false });
  element.addEventListener("load", () => element.classList.toggle("small-source", element.naturalWidth < SMALL_SOURCE));
  element.src = thumbnailOf(run, image);
  return element;
}

// A button that says by its data which image it is for: rank and wrong are for those in a strip.
function fillThumb(button, more = "") {
  const { run, image, rank, wrong } = button.dataset;
  button.title = `${report.runs[run].path[image]}: ${labelOf(run, image)}`;
  button.append(picture(run, image, ""), make("span", { className: "label" }, named(classOf(run, image))));
  const lines = [rank === undefined ? null : `rank ${rank}`, more, wrongLabelOf(run, image)].filter(Boolean);
  button.append(...lines.map((line) => make("span", { className: "more" }, named(line))));
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
