"""Names, values and sentences of the dialogues, split: those of `split="test"` never occur in training.

A fact is a name, a relation and a value: Anna's, home city, Paris. The name "my" stands for the user, who is "your" in an answer.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    return text.split(",")


FIRST = words(
    "Aaron Abigail Ada Adam Adele Adrian Agnes Aisha Alan Albert Alejandro Alexa Alfred Ali Alice Alicia Alina Allison Alma Alvin "
    "Amanda Amber Amelia Amir Amy Ana Anders Andrea Andrew Angela Anika Anita Anna Anthony Antonio Anton April Ariel Arjun Arnold "
    "Arthur Ashley Astrid Audrey August Aurora Ava Barbara Barry Beatrice Becky Bella Ben Benjamin Bernard Beth Betty Bianca Bill "
    "Blake Boris Brad Brandon Brenda Brian Bridget Bruce Bruno Caleb Calvin Camila Carl Carla Carlos Carmen Carol Caroline Casey "
    "Catherine Cecilia Celia Charles Charlie Charlotte Chen Chloe Chris Christine Claire Clara Claudia Clifford Clyde Colin Connor "
    "Conrad Cora Craig Curtis Cynthia Daisy Dale Damian Dan Daniel Daphne Darren Dave David Dawn Deborah Dennis Derek Diana Diego "
    "Dmitri Dominic Donald Dora Doris Dorothy Douglas Duncan Dylan Earl Edgar Edith Edward Edwin Eileen Elaine Eleanor Elena Eli "
    "Elias Elijah Elizabeth Ella Ellen Elliot Elsa Emil Emily Emma Enrique Eric Erica Ernest Esther Ethan Eugene Eva Evan Evelyn "
    "Fatima Faye Felicia Felix Fernando Finn Fiona Flora Florence Frances Francis Frank Fred Freya Gabriel Gail Gary Gavin George "
    "Gerald Gilbert Gina Giovanni Gloria Gordon Grace Graham Grant Greg Greta Gustav Guy Hannah Harold Harriet Harry Harvey Hassan "
    "Hazel Heather Hector Heidi Helen Helga Henry Herbert Hilda Holly Howard Hugh Hugo Ian Ibrahim Ida Igor Imani Ines Ingrid Irene "
    "Iris Isaac Isabel Ivan Ivy Jack Jackie Jacob Jake James Jamie Jan Jane Janet Jasmine Jason Javier Jay Jean Jeff Jennifer Jeremy "
    "Jerome Jesse Jessica Jill Jim Joan Joanna Joe Joel John Jonas Jonathan Jordan Jorge Jose Joseph Joshua Joyce Juan Judith Judy "
    "Julia Julian Julie June Justin Karen Karl Kate Katherine Kathleen Katie Keith Kelly Ken Kenji Kenneth Kevin Khalid Kim Kirk "
    "Klaus Kurt Kyle Lana Lara Larry Laura Lauren Laurence Leah Lee Leila Lena Leo Leon Leonard Leslie Lewis Liam Lillian Lily Linda "
    "Lisa Lois Lorenzo Louis Louise Lucas Lucia Lucy Luis Luke Lydia Lynn Mabel Malcolm Manuel Marcel Marco Marcus Margaret Maria "
    "Marie Marilyn Mario Marion Mark Martha Martin Marvin Mary Mason Matilda Matthew Maureen Maurice Max Maya Megan Mei Melanie "
    "Melissa Mia Michael Michelle Miguel Mike Mila Miles Milo Miranda Miriam Mohammed Molly Monica Morris Nadia Nancy Naomi Natalie "
    "Nathan Neil Nelson Nicholas Nicole Nigel Nikolai Nina Noah Noel Nora Norman Olga Oliver Olivia Omar Oscar Otto Owen Pablo "
    "Pamela Patricia Patrick Paul Paula Pearl Pedro Penny Percy Perry Peter Petra Philip Phoebe Pierre Priya Quentin Quinn Rachel "
    "Rafael Ralph Ramon Randy Raymond Rebecca Regina Renee Rhoda Ricardo Richard Rick Rita Robert Robin Roger Roland Roman Ronald "
    "Rosa Rose Ross Roy Ruby Rudolf Rupert Ruth Ryan Sally Salma Sam Samantha Samuel Sandra Sanjay Sara Sarah Scott Sean Sebastian "
    "Selma Sergio Seth Shane Sharon Sheila Shirley Sidney Silvia Simon Sofia Sonia Sophie Spencer Stanley Stella Stephanie Stephen "
    "Steve Stuart Sue Susan Suzanne Sven Sylvia Tamara Tanya Tara Tatiana Ted Teresa Terry Theo Theresa Thomas Tim Timothy Tina Todd "
    "Tom Tony Tracy Travis Trevor Troy Tyler Ulrich Una Ursula Valerie Vanessa Vera Vernon Veronica Victor Victoria Vikram Vincent "
    "Viola Violet Virginia Vivian Vladimir Wade Wallace Walter Wanda Warren Wayne Wendy Wesley Wilfred William Willow Winston Xavier "
    "Yara Yasmin Yolanda Yusuf Yvonne Zachary Zara Zelda Zoe"
)
LAST = words(
    "Adams Anderson Bailey Baker Barnes Becker Bell Bennett Brooks Brown Butler Campbell Carter Castillo Chavez Clark Coleman Collins "
    "Cook Cooper Cox Davies Diaz Edwards Evans Fischer Fisher Flores Foster Garcia Gomez Gonzalez Gray Green Griffin Gupta Hall "
    "Hansen Harris Hayes Henderson Hernandez Hill Hoffman Howard Hughes Hunt Jackson Jenkins Jensen Johnson Jones Kaplan Keller "
    "Kennedy Khan King Kowalski Kumar Larsen Lewis Long Lopez Marshall Martinez Mason Meyer Miller Mitchell Moore Morgan Morris "
    "Murphy Murray Myers Nelson Nguyen Novak Olson Ortiz Palmer Parker Patel Perez Peterson Phillips Porter Powell Price Reed "
    "Reynolds Richardson Rivera Roberts Robinson Rogers Rossi Russell Sanchez Sanders Sato Schmidt Schneider Scott Shaw Silva Simmons "
    "Singh Smith Stewart Sullivan Tanaka Taylor Thompson Torres Tran Turner Wagner Walker Wallace Ward Watson Weber West White "
    "Williams Wilson Wood Wright Young Zimmerman"
)
CITIES = phrases(
    "Amsterdam,Athens,Atlanta,Auckland,Austin,Baghdad,Baltimore,Bangkok,Barcelona,Beijing,Beirut,Belfast,Berlin,Bern,Bogota,Boston,"
    "Brussels,Bucharest,Budapest,Buenos Aires,Cairo,Calgary,Cape Town,Caracas,Casablanca,Chicago,Cologne,Copenhagen,Dakar,Dallas,"
    "Damascus,Delhi,Denver,Detroit,Dubai,Dublin,Edinburgh,Florence,Frankfurt,Geneva,Glasgow,Hamburg,Hanoi,Havana,Helsinki,Hong Kong,"
    "Houston,Istanbul,Jakarta,Jerusalem,Kiev,Kyoto,Lagos,Las Vegas,Lima,Lisbon,Liverpool,London,Los Angeles,Lyon,Madrid,Manchester,"
    "Manila,Marseille,Melbourne,Mexico City,Miami,Milan,Minneapolis,Montreal,Moscow,Mumbai,Munich,Nairobi,Naples,New Orleans,New York,"
    "Nice,Orlando,Osaka,Oslo,Ottawa,Paris,Philadelphia,Phoenix,Portland,Prague,Quebec,Rio de Janeiro,Rome,Rotterdam,San Diego,"
    "San Francisco,Santiago,Seattle,Seoul,Seville,Shanghai,Singapore,Stockholm,Sydney,Tehran,Tel Aviv,Tokyo,Toronto,Turin,Valencia,"
    "Vancouver,Venice,Vienna,Warsaw,Washington,Wellington,Zurich"
)
COUNTRIES = phrases(
    "Algeria,Argentina,Australia,Austria,Bangladesh,Belgium,Bolivia,Brazil,Bulgaria,Cambodia,Canada,Chile,China,Colombia,Costa Rica,"
    "Croatia,Cuba,Denmark,Ecuador,Egypt,Estonia,Ethiopia,Finland,France,Germany,Ghana,Greece,Guatemala,Hungary,Iceland,India,"
    "Indonesia,Iran,Iraq,Ireland,Israel,Italy,Jamaica,Japan,Jordan,Kenya,Laos,Lebanon,Libya,Malaysia,Mali,Mexico,Mongolia,Morocco,"
    "Nepal,New Zealand,Nigeria,Norway,Pakistan,Panama,Peru,Poland,Portugal,Romania,Russia,Scotland,Senegal,Serbia,Slovakia,"
    "South Africa,South Korea,Spain,Sudan,Sweden,Switzerland,Syria,Thailand,Tunisia,Turkey,Uganda,Ukraine,Uruguay,Venezuela,Vietnam,Wales"
)
ANIMALS = phrases(
    "alpaca,ant,bat,bear,beaver,bee,buffalo,camel,canary,cat,chicken,cow,crab,crow,deer,dog,dolphin,donkey,duck,eagle,elephant,ferret,"
    "fox,frog,gecko,giraffe,goat,goldfish,goose,gorilla,hamster,hawk,hedgehog,horse,iguana,kangaroo,lamb,leopard,lion,lizard,llama,"
    "lobster,monkey,mouse,octopus,otter,owl,panda,parrot,peacock,penguin,pig,pigeon,pony,rabbit,raccoon,rat,raven,salmon,seal,shark,"
    "sheep,snail,snake,spider,squirrel,swan,tiger,toad,tortoise,turkey,turtle,whale,wolf,zebra"
)
FOODS = phrases(
    "apple pie,apples,bacon,bagels,bananas,beans,beef stew,bread,broccoli,burgers,burritos,cabbage,cake,carrots,cheese,cherries,"
    "chicken soup,chili,chocolate,cookies,corn,crepes,cucumbers,curry,donuts,dumplings,eggs,fish,french fries,fried rice,grapes,ham,"
    "honey,hummus,ice cream,kebab,lamb,lasagna,lentils,lobster,mangoes,meatballs,melon,muffins,mushrooms,noodles,nuts,olives,omelette,"
    "onions,oranges,oysters,paella,pancakes,pasta,peaches,peanuts,pears,pickles,pizza,popcorn,pork,potatoes,pudding,pumpkin,ramen,"
    "ravioli,rice,risotto,salad,salmon,sandwiches,sausage,shrimp,soup,spaghetti,spinach,steak,strawberries,sushi,tacos,tofu,tomatoes,"
    "tuna,turkey,waffles,yogurt"
)
DRINKS = phrases(
    "apple juice,beer,black tea,brandy,champagne,cider,cocoa,coffee,cola,espresso,gin,ginger ale,green tea,hot chocolate,iced tea,"
    "lemonade,milk,mineral water,orange juice,rum,sherry,soda,tequila,tomato juice,vodka,water,whiskey,wine"
)
JOBS = phrases(
    "accountant,actor,architect,artist,baker,banker,barber,biologist,builder,butcher,captain,carpenter,cashier,chef,chemist,cleaner,"
    "coach,composer,cook,dancer,dentist,designer,detective,director,doctor,driver,economist,editor,electrician,engineer,farmer,"
    "firefighter,fisherman,florist,gardener,geologist,guard,guide,hairdresser,historian,janitor,jeweler,journalist,judge,lawyer,"
    "librarian,magician,manager,mathematician,mechanic,miner,model,musician,nurse,painter,pharmacist,philosopher,photographer,"
    "physicist,pilot,plumber,poet,police officer,politician,priest,professor,programmer,psychologist,reporter,sailor,scientist,"
    "secretary,singer,soldier,surgeon,tailor,teacher,translator,truck driver,veterinarian,waiter,writer"
)
COLORS = phrases(
    "amber,beige,black,blue,brown,crimson,dark green,gold,gray,green,indigo,ivory,lavender,light blue,lime,magenta,maroon,navy,olive,"
    "orange,pink,purple,red,rose,scarlet,silver,tan,teal,turquoise,violet,white,yellow"
)
INSTRUMENTS = phrases(
    "accordion,banjo,bassoon,bells,bugle,cello,clarinet,cymbals,double bass,drums,fiddle,flute,guitar,harmonica,harp,horn,keyboard,"
    "lute,lyre,mandolin,oboe,organ,piano,recorder,saxophone,sitar,tambourine,trombone,trumpet,tuba,ukulele,viola,violin,xylophone"
)
SPORTS = phrases(
    "archery,badminton,baseball,basketball,bowling,boxing,canoeing,chess,climbing,cricket,curling,cycling,diving,fencing,fishing,"
    "football,golf,gymnastics,handball,hiking,hockey,judo,karate,polo,rowing,rugby,running,sailing,skating,skiing,soccer,softball,"
    "squash,surfing,swimming,table tennis,tennis,volleyball,wrestling,yoga"
)
LANGUAGES = phrases(
    "Arabic,Bengali,Chinese,Czech,Danish,Dutch,English,Finnish,French,German,Greek,Hebrew,Hindi,Hungarian,Icelandic,Irish,Italian,"
    "Japanese,Korean,Latin,Norwegian,Persian,Polish,Portuguese,Russian,Spanish,Swahili,Swedish,Tamil,Thai,Turkish,Welsh"
)
SUBJECTS = phrases(
    "algebra,anatomy,archaeology,art,astronomy,biology,botany,chemistry,computer science,drama,ecology,economics,English,ethics,"
    "geography,geology,geometry,history,law,literature,logic,mathematics,medicine,music,philosophy,physics,poetry,politics,psychology,"
    "religion,sociology,statistics"
)
FLOWERS = phrases(
    "daffodil,daisy,hyacinth,iris,jasmine,lavender,lilac,lily,lotus,marigold,orchid,pansy,peony,poppy,rose,sunflower,tulip,violet"
)
MONTHS = phrases("January,February,March,April,May,June,July,August,September,October,November,December")
CARS = phrases(
    "Audi,BMW,Chevrolet,Ferrari,Fiat,Ford,Honda,Hyundai,Jaguar,Jeep,Kia,Lexus,Mazda,Mercedes,Nissan,Peugeot,Porsche,Renault,Subaru,Tesla,Toyota,Volvo"
)
GEMS = phrases(
    "amber,coral,diamond,emerald,garnet,gold,jade,marble,opal,pearl,platinum,quartz,ruby,sapphire,silver,topaz"
)
NUMBERS = [str(n) for n in range(2, 100)]
YEARS = [str(n) for n in range(1930, 2016)]
WORDS = phrases(
    "anchor,arrow,basket,bridge,butter,candle,castle,cloud,copper,cotton,crystal,desert,dragon,feather,forest,garden,ginger,hammer,"
    "harbor,island,jacket,jungle,kettle,ladder,lantern,magnet,mirror,mountain,needle,ocean,paper,pepper,pillow,planet,pocket,prairie,"
    "puzzle,ribbon,river,rocket,saddle,shadow,spoon,stone,summer,sunset,thunder,tunnel,valley,velvet,window,winter"
)
RELATIONS = {
    **dict.fromkeys(("pet", "favorite animal"), ANIMALS),
    **dict.fromkeys(("favorite color", "car color", "front door color", "eye color"), COLORS),
    **dict.fromkeys(("home city", "birthplace", "favorite city", "office location"), CITIES),
    **dict.fromkeys(("home country", "favorite country", "next holiday destination"), COUNTRIES),
    **dict.fromkeys(("job", "dream job", "first job"), JOBS),
    **dict.fromkeys(("favorite food", "usual breakfast", "favorite snack"), FOODS),
    **dict.fromkeys(("favorite drink", "usual order"), DRINKS),
    **dict.fromkeys(("instrument", "favorite instrument"), INSTRUMENTS),
    **dict.fromkeys(("favorite sport", "hobby"), SPORTS),
    **dict.fromkeys(("lucky number", "age", "room number", "seat number"), NUMBERS),
    **dict.fromkeys(("best friend", "boss", "neighbor", "dog's name", "sister's name", "brother's name"), FIRST),
    **dict.fromkeys(("password", "team name", "code word"), WORDS),
    "birth year": YEARS,
    "native language": LANGUAGES,
    "second language": LANGUAGES,
    "favorite subject": SUBJECTS,
    "favorite flower": FLOWERS,
    "birth month": MONTHS,
    "favorite month": MONTHS,
    "car": CARS,
}
NEW_RELATIONS = {  # never in training
    "boat name": WORDS,
    "teacher's name": FIRST,
    "last meal": FOODS,
    "shoe size": NUMBERS,
    "favorite gemstone": GEMS,
    "school location": CITIES,
    "spirit animal": ANIMALS,
    "costume": JOBS,
}
TELL = {
    "train": [
        "{fact}.",
        "{fact}.",
        "{fact}!",
        "Please remember that {fact}.",
        "By the way, {fact}.",
        "You should know that {fact}.",
        "I heard that {fact}.",
        "Remember: {fact}.",
        "Just so you know, {fact}.",
        "Fun fact: {fact}.",
        "Did you know that {fact}?",
        "It turns out {fact}.",
        "Someone told me {fact}.",
        "For the record, {fact}.",
        "Note this: {fact}.",
        "I want you to remember this. {fact}.",
        "Don't forget that {fact}, okay?",
        "As I said, {fact}, and that matters.",
        "Well, {fact}, as far as I know.",
        "I think {fact}, but let's move on.",
    ],
    "test": [
        "Keep in mind that {fact}.",
        "One more thing: {fact}.",
        "I just found out that {fact}.",
        "Let me tell you something. {fact}.",
        "In case it matters, {fact}.",
    ],
}
ASK = {
    "train": [
        "What is {subject}?",
        "What is {subject}?",
        "What's {subject}?",
        "Do you remember {subject}?",
        "Can you tell me {subject}?",
        "Tell me {subject}.",
        "Quick question: what is {subject}?",
        "Do you know {subject}?",
        "What did I say about {subject}?",
        "I need to know {subject}.",
        "Earlier I mentioned {subject}. What was it?",
        "Could you repeat {subject}?",
        "And {subject}?",
        "Thanks. Now, what is {subject}?",
    ],
    "test": [
        "I forgot {subject}. What is it?",
        "Please remind me of {subject}.",
        "Say, what was {subject} again?",
        "Help me recall {subject}, please.",
    ],
}
REPLY = {
    "train": [
        "Okay, I will remember that.",
        "Got it.",
        "Thank you, noted.",
        "Okay.",
        "I'll keep that in mind.",
        "Sure, thanks for telling me.",
    ],
    "test": ["All right, I have noted that.", "Understood."],
}


def is_test(word: str, share: int = 4) -> bool:
    """One word in `share`, chosen by its letters: the same in every process."""
    return zlib.crc32(word.encode()) % share == 0


def names(split: str) -> tuple[list[str], list[str]]:
    """First and last names of a split."""
    return tuple([n for n in part if is_test(n) == (split == "test")] for part in (FIRST, LAST))


def values(relation: str, split: str) -> list[str]:
    """The values of a relation in a split. Months are in both."""
    found = (RELATIONS | NEW_RELATIONS)[relation]
    return found if "month" in relation else [v for v in found if is_test("value " + v) == (split == "test")]


@dataclass(frozen=True)
class Fact:
    """subject: as the user says it, "Anna's job" or "my job"."""

    name: str
    relation: str
    value: str

    @property
    def subject(self) -> str:
        return f"{self.name} {self.relation}" if self.name == "my" else f"{self.name}'s {self.relation}"

    @property
    def prefix(self) -> str:
        """The beginning of the answer, before the value."""
        subject = self.subject.replace("my", "Your", 1) if self.name == "my" else self.subject
        return f"{subject} is"

    @property
    def answer(self) -> str:
        return f"{self.prefix} {self.value}."

    def tell(self, template: str) -> str:
        return _sentence(template, "{fact}", f"{self.subject} is {self.value}")

    def ask(self, template: str) -> str:
        return _sentence(template, "{subject}", self.subject)


def _sentence(template: str, slot: str, text: str) -> str:
    if template.startswith(slot) or f". {slot}" in template or f"! {slot}" in template:
        text = text[0].upper() + text[1:]
    return template.replace(slot, text)


@dataclass(frozen=True)
class OpenWords:
    """Words of a vocabulary, of the training half: with them names, relations and values are not those of a list."""

    plain: tuple[str, ...]
    capital: tuple[str, ...]

    @classmethod
    def of(cls, tokens: list[str]) -> OpenWords:
        """From the tokens of a byte-level BPE, in which a word behind a space begins with Ġ."""
        words = [t[1:] for t in tokens if t[:1] == "Ġ" and 4 <= len(t) <= 12 and t[1:].isalpha()]
        words = sorted(w for w in words if w.isascii() and not is_test("value " + w) and not is_test(w))
        return cls(tuple(w for w in words if w.islower()), tuple(w for w in words if w.istitle()))


def draw_name(draw: random.Random, split: str, words: OpenWords | None = None) -> str:
    first, last = names(split)
    kind = draw.random()
    if kind < 0.1:
        return "my"
    if words is not None and kind < 0.5:
        return draw.choice(words.capital) if kind < 0.35 else made_up(draw, first)
    return draw.choice(first) if kind < 0.8 else f"{draw.choice(first)} {draw.choice(last)}"


def made_up(draw: random.Random, names: list[str]) -> str:
    """The beginning of one name and the end of another: a name of training that no list has."""
    while True:
        a, b = draw.sample(names, 2)
        name = a[: draw.randint(2, 4)] + b[-draw.randint(2, 4) :].lower()
        if not is_test(name):
            return name


def draw_value(draw: random.Random, relation: str, split: str, words: OpenWords | None = None) -> str:
    if words is None or (relation in RELATIONS and draw.random() < 0.7):
        return draw.choice(values(relation, split))
    found = draw.choice(words.plain if draw.random() < 0.7 else words.capital)
    return f"{found} {draw.choice(words.plain)}" if draw.random() < 0.2 else found


def draw_facts(
    draw: random.Random, count: int, split: str, relations: dict | None = None, words: OpenWords | None = None
) -> list[Fact]:
    """Facts with distinct pairs of name and relation; names and relations repeat, so that neither alone gives the answer.

    words: some names, relations and values are drawn from them.

    >>> facts = draw_facts(random.Random(0), 4, "test")
    >>> len({(fact.name, fact.relation) for fact in facts}), all(is_test("value " + fact.value) for fact in facts)
    (4, True)
    """
    people: list[str] = []
    while len(people) < max(2, (count + 1) // 2):
        name = draw_name(draw, split, words)
        if name.split()[0] not in {p.split()[0] for p in people}:
            people.append(name)
    kinds = sorted(RELATIONS if relations is None else relations)
    chosen = draw.sample(kinds, min(len(kinds), max(2, (count + 1) // 2)))
    if words is not None:
        chosen = [draw.choice(words.plain) if draw.random() < 0.15 else relation for relation in chosen]
        chosen = list(dict.fromkeys(chosen))
    pairs = [(name, relation) for name in people for relation in chosen]
    pairs = draw.sample(pairs, min(count, len(pairs)))
    return [Fact(name, relation, draw_value(draw, relation, split, words)) for name, relation in pairs]
