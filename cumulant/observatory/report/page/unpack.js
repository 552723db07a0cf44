// The data of the page from the few letters that packing.py wrote; what is drawn of one head is read when it is asked for.

function numbersOf(text) {
  const out = [];
  let [value, weight] = [0, 1];
  for (let i = 0; i < text.length; i += 1) {
    const code = text.charCodeAt(i);
    if (code >= 93) {
      value += (code - 93) * weight;
      weight *= 34;
    } else {
      out.push(value + (code - 35) * weight);
      [value, weight] = [0, 1];
    }
  }
  return out;
}

const unfolded = (number) => (number % 2 ? -(number + 1) / 2 : number / 2);

// numbers between two ends, null for what is not known
function ofLevels(packed) {
  if (!packed) return [];
  const [low, high, text] = packed;
  return numbersOf(text).map((n) => (n ? low + ((n - 1) * (high - low)) / 999 : null));
}

function ofHistogram(text, edges) {
  const numbers = numbersOf(text);
  const bins = numbers.length / 3;
  let before = 0;
  return Array.from({ length: bins }, (_, i) => {
    const low = before + unfolded(numbers[i]);
    before = low + numbers[bins + i];
    return [edges[low], edges[before], numbers[2 * bins + i]];
  });
}

const ofCurve = ([at, ...drawn], positions) => ofLevels(drawn).map((value, i) => [positions[at][i], value]);

// for every token [key, percent, key, percent, …]
function ofLooks(text) {
  const numbers = numbersOf(text);
  const rows = Array.from({ length: numbers[0] }, () => []);
  const lengths = numbers.slice(1, 1 + rows.length);
  let key = 1 + rows.length;
  let share = key + lengths.reduce((a, b) => a + b, 0);
  for (let rank = 0; rank < Math.max(0, ...lengths); rank += 1) {
    for (let i = 0; i < rows.length; i += 1) {
      if (lengths[i] <= rank) continue;
      rows[i].push(numbers[key] ? i - unfolded(numbers[key] - 1) : 0, numbers[share]);
      key += 1;
      share += 1;
    }
  }
  return rows;
}

// an object whose entries are made from those of another when they are first asked for
function lazily(entries, make) {
  const out = {};
  for (const [name, packed] of Object.entries(entries)) {
    let made;
    Object.defineProperty(out, name, { enumerable: true, get: () => (made ??= make(packed)) });
  }
  return out;
}

class HeadCell {
  #histogram;
  #curve;
  #edges;
  #positions;

  constructor(numbers, histogram, curve, edges, positions) {
    Object.assign(this, numbers);
    [this.#histogram, this.#curve, this.#edges, this.#positions] = [histogram, curve, edges, positions];
  }

  get histogram() {
    return this.#histogram ? ofHistogram(this.#histogram, this.#edges) : [];
  }

  get by_position() {
    return this.#curve ? ofCurve(this.#curve, this.#positions) : [];
  }
}

function unpackPart(part, edges, positions) {
  const { cells } = part;
  delete part.cells;
  part.heads?.forEach((head, i) => {
    head.values = {};
    for (const [name, { histogram, by_position: curve, ...columns }] of Object.entries(cells)) {
      const known = Object.entries(columns).filter(([, column]) => column[i] !== null);
      const drawn = [histogram?.[i], curve?.[i]];
      if (!known.length && !drawn.some(Boolean)) continue;
      const numbers = Object.fromEntries(known.map(([key, column]) => [key, column[i]]));
      head.values[name] = new HeadCell(numbers, ...drawn, edges, positions);
    }
  });
  for (const text of part.texts ?? []) {
    for (const [quantity, rows] of Object.entries(text.values)) text.values[quantity] = lazily(rows, ofLevels);
    text.looks = lazily(text.looks, ofLooks);
  }
}

async function unpacked() {
  const letters = atob(find("data").textContent.trim());
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i); // `from` takes ten times as long
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = await new Response(stream).json();
  for (const part of [data, ...(data.series?.parts ?? [])]) unpackPart(part, data.edges, data.positions);
  return data;
}
