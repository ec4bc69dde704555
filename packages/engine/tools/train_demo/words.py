"""Word pools of the demo corpus."""

# ruff: noqa: SIM905  (a pool reads best as one line of words)

from __future__ import annotations

NAMES = (
    "Ana Ben Cleo Dan Eva Finn Gina Hugo Iris Jack June Kai Lena Leo Mara Max Nina Noah Olga "
    "Omar Pia Paul Rosa Ravi Sara Sam Tara Tom Uma Vera Vic Will Xena Yara Zoe Zane Alice Bruno "
    "Carla Diego Elsa Felix Grace Henry Ines Jonas Kira Luca Maya Nils Oscar Petra Quinn Ruth "
    "Simon Tina Victor Wanda Yusuf Amir Bella Clara David Emma Frank"
).split()
ANIMALS = (
    "frog fox bear cat dog owl mouse rabbit horse goat duck goose swan deer wolf sheep cow hen "
    "turtle snail crow robin otter badger beaver squirrel hedgehog pony donkey seal"
).split()
OBJECTS = (
    "kite drum lamp book ball hat coat boat bell box cup key map ring rope shoe spoon stone "
    "sword table tent train tree violin watch wheel whistle basket blanket bottle brush bucket "
    "button candle carpet chair clock coin comb compass flag flute fork glove hammer jar kettle "
    "ladder lantern letter marble mirror needle notebook paint pencil pillow plate puzzle "
    "ribbon scarf shell shovel telescope ticket towel trumpet umbrella vase wagon wallet window"
).split()
COLOURS = "red blue green yellow white black brown grey orange purple pink silver golden".split()
ADJECTIVES = (
    "small big old new tall short happy sad proud shy brave clever kind quiet loud quick slow "
    "warm cold soft heavy light bright dark clean dusty empty full strange gentle lucky hungry "
    "tired curious careful friendly funny lazy patient polite"
).split()
PLACES = (
    "garden mill river forest market harbour bridge castle school library station village hill "
    "lake meadow farm bakery tower beach park church museum theatre valley cave island orchard "
    "workshop kitchen attic"
).split()
CITIES = (
    "Rome Oslo Paris Berlin Madrid Lisbon Vienna Prague Warsaw Athens Dublin Helsinki Stockholm "
    "Copenhagen Budapest Brussels Amsterdam Bern London Tokyo Cairo Lima Quito Nairobi Delhi "
    "Beijing Seoul Bangkok Hanoi Jakarta Ottawa Havana Bogota Santiago Canberra Wellington "
    "Tunis Rabat Accra Dakar Ankara Tehran Baghdad Riyadh Sofia Bucharest Belgrade Zagreb Riga "
    "Vilnius"
).split()
CAPITALS = dict(
    pair.split(":")
    for pair in (
        "Italy:Rome Norway:Oslo France:Paris Germany:Berlin Spain:Madrid Portugal:Lisbon "
        "Austria:Vienna Poland:Warsaw Greece:Athens Ireland:Dublin Finland:Helsinki "
        "Sweden:Stockholm Denmark:Copenhagen Hungary:Budapest Belgium:Brussels Japan:Tokyo "
        "Egypt:Cairo Peru:Lima Ecuador:Quito Kenya:Nairobi India:Delhi China:Beijing "
        "Thailand:Bangkok "
        "Vietnam:Hanoi Indonesia:Jakarta Canada:Ottawa Cuba:Havana Colombia:Bogota Chile:Santiago "
        "Australia:Canberra Tunisia:Tunis Morocco:Rabat Ghana:Accra Senegal:Dakar Turkey:Ankara "
        "Iran:Tehran Iraq:Baghdad Bulgaria:Sofia Romania:Bucharest Serbia:Belgrade Croatia:Zagreb "
        "Latvia:Riga Lithuania:Vilnius Switzerland:Bern"
    ).split()
)
OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "big:small hot:cold old:young fast:slow light:dark open:closed full:empty happy:sad "
        "up:down "
        "left:right rich:poor strong:weak early:late clean:dirty wet:dry loud:quiet hard:soft "
        "high:low long:short thick:thin wide:narrow near:far sweet:bitter brave:afraid"
    ).split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
VERBS = "find build paint carry clean open repair sell borrow hide draw lift visit watch".split()
JOBS = (
    "teacher baker doctor farmer painter sailor driver singer writer engineer gardener nurse "
    "pilot cook tailor"
).split()
LANGUAGES = "French German Spanish Italian Polish Dutch Greek Turkish Finnish Danish".split()
# Everyday words for prompts outside the grammar: the model need not understand them.
COMMON = (
    "about above across after again against almost along already also although always among "
    "amount answer anything apply approach area argue around arrive article assume attempt "
    "author available average avoid balance base because become before begin believe benefit "
    "between beyond body budget business calculate careful cause central century certain chance "
    "change chapter check choice city claim class clear client climate close code collect "
    "common company compare complete computer concept condition consider contain content "
    "context control correct cost could country couple course create culture current customer "
    "daily data date deal decide define deliver depend describe design detail develop "
    "difference difficult direct discover discuss document during early economy effect effort "
    "either element energy enough ensure entire error essay event every evidence exactly "
    "example except exercise expect explain express factor false family famous feature field "
    "figure file final first follow force form formal forward found friend function future "
    "general give goal great group growth guide happen health help history hold human idea "
    "image impact important improve include increase indeed industry inform input inside "
    "instead interest issue item join judge keep kind know language large later lead learn "
    "least legal level life like likely limit line list little local logic long machine main "
    "maintain make manage many matter maybe mean measure medical meeting member memory message "
    "method might mind minute mistake model modern moment money month more most move music must "
    "name nation nature necessary need network never next night noise normal note nothing "
    "notice number object observe offer office often only option order other output outside "
    "over own page paper part pattern people perhaps person phone piece place plan planet play "
    "please point policy popular position possible power practice prepare present pressure "
    "price problem process produce product program project proof proper protect prove provide "
    "public purpose quality question quickly quite random range rather reach reader reason "
    "recent recipe record reduce refer region relate release remain remember repeat reply "
    "report request require research respond response result return review right risk role rule "
    "sample scale school science search second secret section seem select sense sentence series "
    "serious server service several shape share short should show similar simple since single "
    "size skill small social software solution some source space speak special speed stage "
    "standard start state step still story structure student study style subject success such "
    "sudden suggest summary support sure system task teach technical term test text than that "
    "their theme theory there these thing think this those though thought through time title "
    "together tone tool topic total trade train travel treat true trust type under understand "
    "unit until update useful user usual value various version view voice want water weather "
    "week weight what when where which while whole wide with within without woman word work "
    "world would write wrong year young your"
).split()
