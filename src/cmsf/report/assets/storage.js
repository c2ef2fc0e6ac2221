// Storage may be forbidden to a page that is opened from a disk; then it forgets, and works all the same.

function remember(storage, key, value) {
  try {
    window[storage].setItem(key, value);
  } catch {
    // nothing to be done
  }
}

function recall(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}
