"""Answers questions about BABILong stories from their sentences alone; knows nothing of how they were made."""

from __future__ import annotations

import re

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


def read(facts):
    """(who, verb, thing or place, to whom) of every fact."""
    walks = r"(\w+) (?:went to|moved to|journeyed to|travelled to|went back to) the (\w+)\."
    takes = r"(\w+) (?:got|took|grabbed|picked up) the (\w+) there\."
    drops = r"(\w+) (?:dropped|discarded|left|put down) the (\w+)\."
    gives = r"(\w+) (?:gave|passed|handed) the (\w+) to (\w+)\."
    for fact in facts:
        for verb, form in (("walk", walks), ("take", takes), ("drop", drops), ("give", gives)):
            if found := re.fullmatch(form, fact):
                yield verb, *found.groups()
                break
        else:
            raise AssertionError(f"not a fact: {fact}")


def follow(facts):
    """Where everyone is, and every place each thing has been at, in order."""
    place, carried, been = {}, {}, {}
    for verb, who, what, *_ in read(facts):
        if verb == "walk":
            assert place.get(who) != what
            place[who] = what
            for thing in (t for t, holder in carried.items() if holder == who):
                been[thing].append(what)
        elif verb == "take":
            assert carried.get(what) is None, "someone else holds it"
            assert what not in been or been[what][-1] == place[who], "it lies elsewhere"
            carried[what] = who
            been.setdefault(what, [place[who]])
        else:
            assert carried[what] == who
            carried[what] = None
    return place, been


def answer(task: str, facts, question: str) -> str:
    if task == "qa1":
        return follow(facts)[0][re.fullmatch(r"Where is (\w+)\?", question)[1]]
    if task == "qa2":
        return follow(facts)[1][re.fullmatch(r"Where is the (\w+)\?", question)[1]][-1]
    if task == "qa3":
        thing, at = re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question).groups()
        been = follow(facts)[1][thing]
        assert been.count(at) == 1
        return been[been.index(at) - 1]
    if task == "qa4":
        known = {}
        for fact in facts:
            a, way, b = re.fullmatch(r"The (\w+) is (\w+) of the (\w+)\.", fact).groups()
            known[way, b], known[OPPOSITE[way], a] = a, b  # what lies that way of it
        if found := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
            return known[found.groups()]
        place, way = re.fullmatch(r"What is the (\w+) (\w+) of\?", question).groups()
        return known[OPPOSITE[way], place]
    given = [(who, what, to[0]) for verb, who, what, *to in read(facts) if verb == "give"][::-1]
    forms = {
        r"What did (\w+) give to (\w+)\?": lambda g, a, b: g[1] if (g[0], g[2]) == (a, b) else None,
        r"Who did (\w+) give the (\w+) to\?": lambda g, a, b: g[2] if g[:2] == (a, b) else None,
        r"Who gave the (\w+) to (\w+)\?": lambda g, a, b: g[0] if g[1:] == (a, b) else None,
        r"Who gave the (\w+)\?": lambda g, a: g[0] if g[1] == a else None,
        r"Who received the (\w+)\?": lambda g, a: g[2] if g[1] == a else None,
    }
    for form, match in forms.items():
        if found := re.fullmatch(form, question):
            return next(x for g in given if (x := match(g, *found.groups())) is not None)
    raise AssertionError(question)
