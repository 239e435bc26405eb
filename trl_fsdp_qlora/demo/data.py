"""A small real task, made on the spot: a note about an expense, written as people write it, becomes one line of strict JSON.

    "Twelve euros fifty went on train tickets."  ->  {"item": "train tickets", "amount": 12.50, "currency": "EUR"}

A small pretrained model knows the words but neither the exact keys, the two decimals, nor the currency codes, so fine-tuning shows:
in the held-out loss, in the answers a person can read, and in their exact match. The sentences are put together here from word lists
written for this project (Apache-2.0, like the rest of it); nothing is downloaded.

Training and held-out rows have no item in common: a held-out answer can't be recited, it must be read out of the sentence.
"""

import random

SYSTEM = "Answer with JSON: item, amount, currency."

# (code, sign, singular, plural, cent, cents)
CURRENCIES = [
    ("EUR", "€", "euro", "euros", "cent", "cents"),
    ("USD", "$", "dollar", "dollars", "cent", "cents"),
    ("GBP", "£", "pound", "pounds", "penny", "pence"),
    ("INR", "₹", "rupee", "rupees", "paisa", "paise"),
    ("CHF", "Fr. ", "Swiss franc", "Swiss francs", "centime", "centimes"),
]

FRAMES = [
    "I paid {amount} for {item}.",
    "{item} cost me {amount}.",
    "Spent {amount} on {item} yesterday.",
    "Bought {item} for {amount}.",
    "{amount} went on {item}.",
    "We got {item}, {amount} in total.",
    "Please note {amount} for {item}.",
    "The bill for {item} came to {amount}.",
    "On Monday I bought {item} and paid {amount}.",
    "{item}: {amount}",
    "Anna needs {amount} back for {item}.",
    "They charged us {amount} for {item}.",
    "Add {item} to the list, it was {amount}.",
    "Only {amount} for {item}, not bad!",
]

# Some with an article, which the answer leaves out.
TRAIN_ITEMS = """
train tickets, bus fare, a taxi ride, bicycle repair, parking, car wash, engine oil, winter tyres, a road map, bridge toll,
coffee beans, green tea, orange juice, fresh bread, brown rice, olive oil, goat cheese, smoked salmon, chicken wings, tomato soup,
pizza, lunch, dinner, breakfast, ice cream, chocolate cake, birthday candles, party balloons, paper plates, napkins,
printer paper, blue ink, pencils, a notebook, envelopes, postage stamps, a desk lamp, an office chair, a keyboard, headphones,
a phone case, a charger, batteries, light bulbs, an extension cord, wall paint, a hammer, nails, garden hose, flower pots,
tulips, grass seed, dog food, a cat toy, fish tank filters, vet visit, cough syrup, bandages, toothpaste, shampoo,
hand soap, sunscreen, a haircut, swimming lessons, gym membership, yoga mat, running shoes, a rain jacket, wool socks, a leather belt,
a silk scarf, sunglasses, a wrist watch, museum entry, cinema tickets,
concert tickets, a board game, playing cards, guitar strings, piano lessons, a cookbook, two novels, a magazine, newspapers,
photo prints, picture frames, a wedding gift, laundry, dry cleaning, window cleaning,
hotel room, camping site, a sleeping bag, a tent, ski rental, boat trip, city tour, luggage storage, travel insurance, a passport photo
"""

HELD_OUT_ITEMS = """
ferry tickets, a rental car, brake pads, a bike helmet, apple pie, black pepper, frozen peas, peanut butter, mineral water, noodle soup,
sushi, a picnic basket, gift wrap, a stapler, red markers, a wireless mouse, a memory card, door handles, a screwdriver, rose bushes,
bird seed, eye drops, shaving cream, dance classes, hiking boots, a wool hat, zoo entry, theatre tickets, a jigsaw puzzle, violin strings,
a travel guide, poster prints, carpet cleaning, a hostel bed, a fishing rod, a museum guide, garden gloves, a bread knife, table cloths,
a cat basket
"""

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def _items(words):
    return [item.strip() for item in words.replace("\n", " ").split(",")]


def _name(item):
    """The item as the answer has it: without its article."""
    return item.removeprefix("a ").removeprefix("an ")


def _words(number):
    """0..99 in English words."""
    if number < 20:
        return SMALL[number]
    return TENS[number // 10] + (f"-{SMALL[number % 10]}" if number % 10 else "")


def _say_amount(whole, cents, currency, rng):
    """One of the many ways in which people write an amount of money."""
    code, sign, one, many, cent, cents_word = currency
    unit = one if whole == 1 else many
    cent_unit = cent if cents == 1 else cents_word
    if cents == 0:
        return rng.choice([f"{sign}{whole}", f"{whole} {unit}", f"{_words(whole)} {unit}", f"{whole} {code}", f"{sign}{whole}.00"])
    figures = f"{whole}.{cents:02d}"
    ways = [f"{sign}{figures}", f"{figures} {unit if whole != 1 else many}", f"{figures} {code}", f"{whole} {unit} and {cents} {cent_unit}"]
    if cents >= 10:
        ways += [f"{_words(whole)} {unit} {_words(cents)}", f"{whole} {unit} {cents}"]
    ways.append(f"{_words(whole)} {unit} and {_words(cents)} {cent_unit}")
    return rng.choice(ways)


def _row(item, rng):
    """One conversational prompt/completion row about `item`."""
    whole = rng.randint(1, 99)
    cents = rng.choice([0, 0, 50, 20, 80, 95, 99, 5, rng.randint(1, 99), rng.randint(10, 99)])
    currency = rng.choice(CURRENCIES)
    note = rng.choice(FRAMES).format(amount=_say_amount(whole, cents, currency, rng), item=item)
    note = note[0].upper() + note[1:]
    name = _name(item)
    answer = f'{{"item": "{name}", "amount": {whole}.{cents:02d}, "currency": "{currency[0]}"}}'
    return {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": note}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def _rows(items, count, seed):
    """`count` different rows; the items take turns, so that all of them occur about equally often."""
    if count < 1:
        raise ValueError(f"`count={count}` asks for no rows. Write 1 or more.")
    rng = random.Random(f"trl_fsdp_qlora expenses {seed} {count}")
    rows, notes, deck = [], set(), []
    while len(rows) < count:
        if not deck:
            deck = rng.sample(items, len(items))
        row = _row(deck.pop(), rng)
        note = row["prompt"][1]["content"]
        if note not in notes:
            notes.add(note)
            rows.append(row)
    return rows


def training_rows(count: int = 224, seed: int = 0) -> list[dict]:
    """`count` conversational prompt/completion rows about the training items."""
    return _rows(_items(TRAIN_ITEMS), count, seed)


def held_out_rows(count: int = 31, seed: int = 0) -> list[dict]:
    """`count` rows about items that no training row mentions.

    Raises:
        ValueError: if the word lists overlap, so that a held-out answer could be recited.
    """
    known = [_name(item) for item in _items(TRAIN_ITEMS)]
    shared = [name for name in map(_name, _items(HELD_OUT_ITEMS)) if any(name in other or other in name for other in known)]
    if shared:
        raise ValueError(f"Training and held-out items overlap: {', '.join(shared)}.")
    return _rows(_items(HELD_OUT_ITEMS), count, seed)
