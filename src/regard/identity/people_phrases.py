"""How facts are told, answered and asked for, in two pools that share no sentence.

In a phrase, {v} is the value, {a} the value with its article ("a tortoise"), {A} the same at the start
of a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from .people_words import Pool


@dataclass(frozen=True)
class Phrases:
    """One kind of fact: told in three lengths, echoed by the listener, asked for later in other words."""

    tells: tuple[str, str, str]
    echo: str
    asks: tuple[tuple[str, str], tuple[str, str]]
    question: str
    more: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Style:
    """How a person writes: the length of what they tell, how they begin, go on, end, and come back."""

    length: int
    greetings: tuple[str, ...]
    links: tuple[str, ...]
    endings: tuple[str, ...]
    returns: tuple[str, ...]


_TEST: dict[str, Phrases] = {
    "name": Phrases(
        ("{v} here.", "I go by {v}.", "Everybody calls me {v}, so please do the same."),
        "Pleased to meet you, {v}.",
        (
            ("Do you recall who this is?", "Of course, you are {v}."),
            ("Who is writing to you now?", "It is you, {v}."),
        ),
        "What is my name?",
    ),
    "city": Phrases(
        ("I live in {v}.", "Home is a small flat in {v}.", "We moved to {v} years ago and never left."),
        "People say that {v} is lovely in spring.",
        (
            ("Which town am I going back to?", "Back to {v}."),
            ("Where does my train home stop?", "It stops in {v}."),
        ),
        "Which city do I live in?",
    ),
    "job": Phrases(
        ("I work as {a}.", "I earn my living as {a}.", "These days I pay the rent as {a}, mostly on early shifts."),
        "Being {a} must keep you busy.",
        (
            ("What goes under occupation on this form?", "Write {v} there."),
            ("What am I by trade?", "By trade you are {a}."),
        ),
        "What is my job?",
    ),
    "cat_name": Phrases(
        (
            "Our cat {v} sleeps on my keyboard.",
            "I share the sofa with a cat named {v}.",
            "A stray cat adopted me last winter and I named her {v}.",
        ),
        "Give {v} a scratch behind the ears from me.",
        (
            ("Who will be purring when I get in?", "{v}, your cat."),
            ("Whose little bowl must I fill?", "That of {v}, the cat."),
        ),
        "What is my cat called?",
    ),
    "dog_name": Phrases(
        (
            "I walk my dog {v} before breakfast.",
            "There is a dog at home, {v} by name.",
            "The puppy we took in is called {v} and chews everything.",
        ),
        "So {v} keeps you company on long walks.",
        (
            ("Who needs the lead this evening?", "{v} does, your dog."),
            ("Who barks when the bell rings?", "That would be {v}, your dog."),
        ),
        "What is my dog called?",
    ),
    "pet": Phrases(
        (
            "I keep {a} at home.",
            "The other resident here is {a}, a gift from my uncle.",
            "You may laugh, but I look after {a} in the spare room.",
        ),
        "Looking after {a} takes patience.",
        (
            ("Which animal am I feeding tonight?", "Your {v}."),
            ("What creature shares my house?", "{A}, as far as I know."),
        ),
        "What kind of animal do I keep?",
    ),
    "sister": Phrases(
        (
            "My sister is {v}.",
            "I have one sister, {v}, two years older.",
            "I grew up sharing a room with my sister {v}, who snores.",
        ),
        "I am sure that {v} is glad to have you.",
        (
            ("Which girl did my parents also raise?", "{v}, your sister."),
            ("Whose brother or sister am I?", "You and {v} are siblings."),
        ),
        "What is my sister's name?",
    ),
    "brother": Phrases(
        (
            "My brother {v} visits on Sunday.",
            "I have a younger brother, and he is called {v}.",
            "It was my brother {v} who taught me to ride a bicycle.",
        ),
        "It sounds as if {v} is good to you.",
        (
            ("Which boy did I grow up with?", "With {v}, your brother."),
            ("Which young man shares my surname?", "Your brother {v}."),
        ),
        "What is my brother's name?",
    ),
    "daughter": Phrases(
        (
            "My daughter {v} is five.",
            "I have a daughter, {v}, who starts school soon.",
            "Last night my daughter {v} read me a whole story for once.",
        ),
        "How nice for little {v}.",
        (
            ("Which child do I fetch from school?", "{v}, your girl."),
            ("Whose drawings hang on my fridge?", "Those of {v}, your child."),
        ),
        "What is my daughter's name?",
    ),
    "friend": Phrases(
        (
            "{v} is my best friend.",
            "My closest friend since school is {v}.",
            "If I need to laugh I ring {v}, my oldest friend.",
        ),
        "A friend like {v} is worth a lot.",
        (
            ("Whom do I ring in a crisis?", "You could ring {v}."),
            ("Who knows me better than anyone?", "I would say {v}."),
        ),
        "What is my best friend's name?",
    ),
    "boss": Phrases(
        (
            "I report to a certain {v}.",
            "My new boss is somebody called {v}.",
            "The boss, {v}, wants all of us in by eight.",
        ),
        "I hope that {v} is fair with you.",
        (
            ("Who signs off my holidays?", "Your manager, {v}."),
            ("Whose office do I dread?", "The office of {v}."),
        ),
        "What is my boss's surname?",
    ),
    "food": Phrases(
        (
            "I could eat {v} daily.",
            "Nothing on a menu beats {v} for me.",
            "On Fridays I make {v}, which I love above all other dishes.",
        ),
        "A plate of {v} does sound good.",
        (
            ("What should I cook to cheer myself up?", "Cook {v}."),
            ("What do I order when it is my treat?", "You order {v}."),
        ),
        "What is my favourite food?",
    ),
    "allergy": Phrases(
        (
            "I am allergic to {v}.",
            "My doctor found an allergy to {v}.",
            "I have to carry tablets because of an allergy to {v}.",
        ),
        "I will remember to be careful with {v}.",
        (
            ("What brings me out in a rash?", "Contact with {v}."),
            ("What must I stay away from?", "Stay away from {v}."),
        ),
        "What am I allergic to?",
    ),
    "hobby": Phrases(
        (
            "I am into {v}.",
            "My free evenings go to {v}.",
            "Ever since a cousin showed me how, my great hobby has been {v}.",
        ),
        "Many people find {v} calming.",
        (
            ("How do I like to pass a weekend?", "With some {v}."),
            ("What do I do to unwind?", "You unwind with {v}."),
        ),
        "What is my hobby?",
    ),
    "instrument": Phrases(
        (
            "I play the {v}.",
            "I have taken up the {v} again.",
            "The neighbours complain whenever I practise the {v} after ten.",
        ),
        "It takes years to master the {v}.",
        (
            ("What do I bring to band night?", "Bring the {v}."),
            ("What makes the music in my living room?", "The {v}, in your hands."),
        ),
        "Which instrument do I play?",
    ),
    "sport": Phrases(
        (
            "My sport is {v}.",
            "I train twice a week, for {v}.",
            "Three of us joined a club for {v}, and my legs still hurt.",
        ),
        "I hear that {v} is hard work.",
        (
            ("What is my gym bag packed for?", "It is packed for {v}."),
            ("How do I keep fit?", "Through {v}."),
        ),
        "Which sport do I do?",
    ),
    "bike_colour": Phrases(
        (
            "I ride a bike, {a} one.",
            "I have just painted my bike {v}.",
            "Someone scratched my bike, so now the {v} paint is peeling.",
        ),
        "{A} bike is easy to spot.",
        (
            ("Which bicycle in the rack is mine?", "The {v} one."),
            ("What shade are my two wheels?", "They are {v}."),
        ),
        "What colour is my bike?",
    ),
    "favourite_colour": Phrases(
        (
            "I like {v} best of all colours.",
            "Of all colours I prefer {v}.",
            "Half of what I wear is {v}, simply because I adore the colour.",
        ),
        "I can picture a room in {v}.",
        (
            ("Which paint would please me most?", "Something {v}."),
            ("What shade should my scarf be?", "Make it {v}."),
        ),
        "What is my favourite colour?",
    ),
    "birthday": Phrases(
        (
            "I was born on {v}.",
            "My birthday falls on {v}.",
            "We always eat cake on {v}, as that is my birthday.",
        ),
        "I will think of you on {v}.",
        (
            ("When do I turn a year older?", "On {v}."),
            ("Which day should guests bring presents?", "They should come on {v}."),
        ),
        "When is my birthday?",
    ),
    "author": Phrases(
        (
            "I read a lot of {v}.",
            "The writer I return to is {v}.",
            "I have gone through everything by {v} and still want more.",
        ),
        "There is much to discover in {v}.",
        (
            ("Whose books fill my shelf?", "Books by {v}."),
            ("Whose novel should I take along?", "One by {v}."),
        ),
        "Who is my favourite author?",
    ),
    "language": Phrases(
        (
            "I am learning {v}.",
            "I take evening classes in {v}.",
            "I have started to study {v}, and the grammar is driving me mad.",
        ),
        "Learning {v} takes courage.",
        (
            ("Which words am I drilling on my cards?", "Words in {v}."),
            ("What tongue am I trying to speak?", "You are trying {v}."),
        ),
        "Which language am I learning?",
    ),
    "drink": Phrases(
        (
            "I mostly drink {v}.",
            "What I drink at my desk is {v}.",
            "The waiter brings me {v} before I even sit down.",
        ),
        "A glass of {v} is hard to beat.",
        (
            ("What can I get from the bar?", "Get your usual {v}."),
            ("What goes in my cup?", "Your cup wants {v}."),
        ),
        "What is my favourite drink?",
    ),
    "street": Phrases(
        (
            "My house is on {v}.",
            "My address is on {v}.",
            "Our house is the narrow one on {v}, next to the chemist.",
        ),
        "I imagine {v} as a quiet place.",
        (
            ("Where should the taxi drop me?", "On {v}, by your door."),
            ("What does the sign at my corner say?", "It says {v}."),
        ),
        "Which street do I live on?",
    ),
    "fear": Phrases(
        (
            "I am scared of {v}.",
            "I have always been afraid of {v}.",
            "I nearly fainted yesterday, because I cannot cope with {v}.",
        ),
        "Plenty of people are uneasy about {v}.",
        (
            ("What gives me nightmares?", "Your nightmares are about {v}."),
            ("What makes my heart race?", "The thought of {v}."),
        ),
        "What am I afraid of?",
    ),
    "trip": Phrases(
        (
            "I am off to {v} soon.",
            "I have booked a holiday in {v}.",
            "We are saving up all year for a journey to {v}.",
        ),
        "Bring me a story from {v}.",
        (
            ("Where will my suitcase end up?", "It will end up in {v}."),
            ("Which guidebook should I pack?", "The one about {v}."),
        ),
        "Where am I going on holiday?",
    ),
    "subject": Phrases(
        (
            "I studied {v}.",
            "My degree is in {v}.",
            "I spent four years at university on {v}, and do not regret it.",
        ),
        "I find {v} fascinating.",
        (
            ("What were my lectures about?", "They were about {v}."),
            ("What does my diploma say?", "It says {v}."),
        ),
        "What did I study at university?",
    ),
}

_TRAIN: dict[str, Phrases] = {
    "name": Phrases(
        ("It's {v}.", "You can put me down as {v}.", "My parents settled on {v} for me, and I have kept it."),
        "Nice to hear from you, {v}.",
        (
            ("Can you tell who is talking?", "Yes, {v} is talking."),
            ("How would you address me?", "I would address you as {v}."),
        ),
        "What am I called?",
        (
            ("Sign this letter for me.", "Signed, {v}."),
            ("Which name belongs on my badge?", "The badge should read {v}."),
        ),
    ),
    "city": Phrases(
        ("I'm based in {v}.", "I rent a place in {v}.", "For ten years now I have been settled in {v}, close to the river."),
        "It must be pleasant to walk around {v}.",
        (
            ("In which city do my letters arrive?", "They arrive in {v}."),
            ("Where do I wake up each morning?", "In {v}, at home."),
        ),
        "What city is my home?",
        (
            ("For which place do I check the weather?", "You check it for {v}."),
            ("Whose mayor do I vote for?", "The mayor of {v}."),
        ),
    ),
    "job": Phrases(
        ("I'm {a} by profession.", "I am employed as {a}.", "After a long search they hired me as {a}, and I like it so far."),
        "The world needs more than one good {v}.",
        (
            ("What is printed on my business card?", "Your card says {v}."),
            ("How do I make money?", "You make it as {a}."),
        ),
        "What do I do for a living?",
        (
            ("Which trade did I choose?", "You chose to be {a}."),
            ("What would my colleagues say I am?", "They would say {a}."),
        ),
    ),
    "cat_name": Phrases(
        (
            "I have a cat, {v}.",
            "The cat in my kitchen answers to {v}.",
            "Yesterday {v}, that cat of mine, climbed all the way up the curtains.",
        ),
        "No doubt {v} rules the house.",
        (
            ("Who scratches at my sofa?", "The cat does, {v}."),
            ("Which name do I call at the cat flap?", "You call {v}."),
        ),
        "What is the name of my cat?",
        (
            ("Who hunts the mice around here?", "Your cat {v} hunts them."),
            ("Which pet sits on my windowsill?", "Your feline, {v}."),
        ),
    ),
    "dog_name": Phrases(
        (
            "I've got a dog, {v}.",
            "My dog answers to {v}.",
            "Somebody left a dog at the shelter, and now {v} lives with me.",
        ),
        "I bet that {v} loves the park.",
        (
            ("Who fetches my stick?", "Your dog fetches it, good {v}."),
            ("Which name do I shout across the park?", "You shout {v}."),
        ),
        "What is the name of my dog?",
        (
            ("Who wags a tail at me?", "Your hound {v} does."),
            ("For whom did I buy a bone?", "You bought it for {v}."),
        ),
    ),
    "pet": Phrases(
        (
            "My pet is {a}.",
            "The vet knows me well, because of my {v}.",
            "A neighbour gave me {a} to mind, and I ended up keeping it.",
        ),
        "Not everyone can handle {a}.",
        (
            ("For what do I buy feed?", "You buy it for your {v}."),
            ("Who lives in my cage or tank?", "That is where the {v} lives."),
        ),
        "Which pet do I own?",
        (
            ("What do my visitors ask to see?", "They ask to see the {v}."),
            ("What am I taking to the vet?", "You are taking the {v}."),
        ),
    ),
    "sister": Phrases(
        (
            "{v} is my sister.",
            "I am meeting my big sister {v} at noon.",
            "My parents had two of us, and the clever one is my sister {v}.",
        ),
        "Say hello to {v} from me.",
        (
            ("What did my parents call their other girl?", "They called her {v}."),
            ("Whom did I quarrel with over toys?", "Your sister, {v}."),
        ),
        "What is my sister called?",
        (
            ("Who is aunt to my children?", "Aunt {v} is."),
            ("What is the woman raised beside me called?", "She is called {v}."),
        ),
    ),
    "brother": Phrases(
        (
            "{v} is my brother.",
            "I lent some money to my brother, {v}.",
            "Every summer I go camping with my brother {v} and his tent.",
        ),
        "Brothers like {v} are good to have.",
        (
            ("Who is uncle to my children?", "Uncle {v} is."),
            ("Which lad shared my toys?", "Your brother did, {v}."),
        ),
        "What is my brother called?",
        (
            ("What did my mother name her boy?", "She named him {v}."),
            ("Which man shares my parents?", "That man is {v}."),
        ),
    ),
    "daughter": Phrases(
        (
            "{v} is my daughter.",
            "My little girl is named {v}.",
            "I am up late again since my daughter {v} has a cold.",
        ),
        "Being a parent to {v} must be a joy.",
        (
            ("Whom do I tuck in at night?", "You tuck in {v}."),
            ("Which girl calls me her parent?", "Your daughter {v} does."),
        ),
        "What is my daughter called?",
        (
            ("Whose school play am I attending?", "The play of {v}, your girl."),
            ("Whom did I teach to walk?", "You taught {v}, your child."),
        ),
    ),
    "friend": Phrases(
        (
            "My best friend: {v}.",
            "I spend a lot of time with {v}, a very dear friend.",
            "No friend has stood by me for as long as {v} has.",
        ),
        "You are lucky to know {v}.",
        (
            ("Who will be witness at my wedding?", "Surely {v} will."),
            ("Who gets my spare key?", "Give it to {v}."),
        ),
        "Who is my best friend?",
        (
            ("With whom do I share secrets?", "You share them with {v}."),
            ("Who sits beside me at concerts?", "Your good friend {v}."),
        ),
    ),
    "boss": Phrases(
        (
            "My boss is {v}.",
            "At work I answer to {v}, the head of department.",
            "There was another long meeting with my boss, a person called {v}.",
        ),
        "Perhaps {v} means well.",
        (
            ("Who decides on my pay?", "That is decided by {v}."),
            ("Who gives me orders at work?", "You take them from {v}."),
        ),
        "What is the surname of my boss?",
        (
            ("To whom do I hand in my notice?", "You hand it to {v}."),
            ("Who runs my department?", "It is run by {v}."),
        ),
    ),
    "food": Phrases(
        (
            "Favourite dish: {v}.",
            "If you invite me, please serve {v}.",
            "My grandmother spoiled me with {v}, and I have craved it ever since.",
        ),
        "I understand why you enjoy {v}.",
        (
            ("What is on my plate on a good day?", "A helping of {v}."),
            ("Which recipe do I know by heart?", "The recipe for {v}."),
        ),
        "Which food do I like most?",
        (
            ("What would win me over at dinner?", "Some {v} would."),
            ("What do I ask for on my birthday?", "You ask for {v}."),
        ),
    ),
    "allergy": Phrases(
        (
            "I can't tolerate {v}.",
            "It turns out that I react badly to {v}.",
            "I was in hospital as a child, since my body cannot stand {v}.",
        ),
        "Then let us keep {v} at a distance.",
        (
            ("What makes me sneeze and swell?", "That happens with {v}."),
            ("What should the nurse write in red?", "An allergy: {v}."),
        ),
        "What do I have an allergy to?",
        (
            ("Against what do I carry medicine?", "You carry it against {v}."),
            ("What is dangerous for me?", "For you, {v}."),
        ),
    ),
    "hobby": Phrases(
        (
            "Hobby: {v}.",
            "I relax by means of {v}.",
            "My partner rolls both eyes at my passion for {v}.",
        ),
        "You could tell me more about {v}.",
        (
            ("What keeps me busy on rainy days?", "Your hobby, {v}."),
            ("What could I talk about for hours?", "You could talk about {v}."),
        ),
        "What do I do in my spare time?",
        (
            ("Which course should I sign up for?", "Something on {v}."),
            ("What is my favourite pastime?", "It is {v}, clearly."),
        ),
    ),
    "instrument": Phrases(
        (
            "I practise the {v}.",
            "I take lessons on the {v}.",
            "At the weekend I performed in public on the {v}, rather badly.",
        ),
        "I would like to hear you on the {v}.",
        (
            ("What is in my music case?", "Your {v} is in there."),
            ("What do I play in the orchestra?", "Your part is for {v}."),
        ),
        "What instrument can I play?",
        (
            ("What did I learn from sheet music?", "You learned the {v}."),
            ("What needs tuning before my concert?", "Your {v}, I suppose."),
        ),
    ),
    "sport": Phrases(
        (
            "I do {v}.",
            "I compete in {v} at a modest level.",
            "My doctor told me to move more, and I picked {v}.",
        ),
        "Good luck with the {v}.",
        (
            ("For what did I win a medal?", "You won it for {v}."),
            ("What does my coach teach me?", "Your coach teaches {v}."),
        ),
        "What is my sport?",
        (
            ("What do I watch and practise?", "Both times it is {v}."),
            ("Why am I so sore today?", "You overdid the {v}."),
        ),
    ),
    "bike_colour": Phrases(
        (
            "My bike is {v}.",
            "I go everywhere on my {v} bike.",
            "The shop had one bike left, in {v}, and I bought it.",
        ),
        "Take care of that {v} bike.",
        (
            ("How would police describe my stolen bicycle?", "As {a} bicycle."),
            ("What tint has my bicycle frame?", "{A} tint."),
        ),
        "Which colour does my bike have?",
        (
            ("What paint do I need for my cycle?", "You need {v} paint."),
            ("What does my bicycle look like?", "It looks {v}."),
        ),
    ),
    "favourite_colour": Phrases(
        (
            "Favourite colour: {v}.",
            "No colour suits me like {v}.",
            "I had the whole kitchen done in {v}, the colour I like most.",
        ),
        "Few would choose {v}, but it has charm.",
        (
            ("In which tone do I paint walls?", "You pick {v}."),
            ("What tint are my best clothes?", "They tend to be {v}."),
        ),
        "Which colour do I like best?",
        (
            ("What ribbon would suit my gift?", "{A} ribbon."),
            ("Which crayon do I wear down first?", "The {v} crayon."),
        ),
    ),
    "birthday": Phrases(
        (
            "Birthday: {v}.",
            "Please send me good wishes on {v}, my birthday.",
            "My twin and I share a birthday, and that day is {v}.",
        ),
        "Then {v} is a special day.",
        (
            ("When do I blow out candles?", "Each year on {v}."),
            ("What date is in my passport?", "It gives {v}."),
        ),
        "On which date was I born?",
        (
            ("When is my party?", "The party is on {v}."),
            ("When will I be a year wiser?", "That happens on {v}."),
        ),
    ),
    "author": Phrases(
        (
            "I love reading {v}.",
            "On my night table there is always something by {v}.",
            "Our teacher made us read {v}, and I never stopped.",
        ),
        "Reading {v} is time well spent.",
        (
            ("Who wrote the novels I love?", "They were written by {v}."),
            ("Whose signature would I queue for?", "For that of {v}."),
        ),
        "Which author do I like most?",
        (
            ("Who would I quote in a speech?", "You would quote {v}."),
            ("Which shelf do I visit first?", "The one marked {v}."),
        ),
    ),
    "language": Phrases(
        (
            "I study {v}.",
            "I bought a course to teach myself {v}.",
            "My in-laws speak nothing but {v}, so I am taking lessons.",
        ),
        "I admire anyone who tries {v}.",
        (
            ("Which dictionary do I carry about?", "One for {v}."),
            ("What is my tutor teaching me?", "Your tutor teaches {v}."),
        ),
        "What language do I study?",
        (
            ("In what do I stumble over verbs?", "You stumble in {v}."),
            ("Which films do I watch for practice?", "Films in {v}."),
        ),
    ),
    "drink": Phrases(
        (
            "I live on {v}.",
            "When I am thirsty, I reach for {v}.",
            "There are nine bottles of {v} in my fridge, for I like nothing better.",
        ),
        "I see the appeal of {v}.",
        (
            ("What quenches my thirst?", "Usually {v} does."),
            ("What should the host pour me?", "Ask for {v}."),
        ),
        "Which drink do I like most?",
        (
            ("What do I sip in the morning?", "You sip {v}."),
            ("What is in my flask?", "It is full of {v}."),
        ),
    ),
    "street": Phrases(
        (
            "My street is {v}.",
            "You will find my door on {v}.",
            "They are digging up {v}, so I cannot park at my own house.",
        ),
        "I hope that {v} has good neighbours.",
        (
            ("Where is my mailbox?", "Your mailbox is on {v}."),
            ("Along which road do I walk home?", "Along {v}."),
        ),
        "What is the name of my street?",
        (
            ("Where do I send the pizza man?", "Send him to {v}."),
            ("Outside which address is my car?", "Outside yours, on {v}."),
        ),
    ),
    "fear": Phrases(
        (
            "I can't bear {v}.",
            "What terrifies me is {v}.",
            "My children think it funny that I run away from {v}.",
        ),
        "A dread of {v} is nothing to be ashamed of.",
        (
            ("What would make me scream?", "You would scream about {v}."),
            ("Which phobia do I have?", "You have one of {v}."),
        ),
        "What is my greatest fear?",
        (
            ("What do I avoid at any cost?", "You avoid {v}."),
            ("Why did I tremble?", "Because of {v}."),
        ),
    ),
    "trip": Phrases(
        (
            "Next holiday: {v}.",
            "I am counting the days until I fly to {v}.",
            "My suitcase is already packed for three weeks in {v}.",
        ),
        "I wish you a good time in {v}.",
        (
            ("What do my plane tickets say?", "They say {v}."),
            ("Which country or region will I explore?", "You will explore {v}."),
        ),
        "Where will I travel next?",
        (
            ("Where will my postcards come from?", "They will come from {v}."),
            ("Which map should I buy?", "Buy a map of {v}."),
        ),
    ),
    "subject": Phrases(
        (
            "I have a degree in {v}.",
            "At college I chose {v}.",
            "My father wanted a lawyer, but I enrolled for {v} instead.",
        ),
        "You could put {v} to good use.",
        (
            ("What was my thesis on?", "Your thesis was on {v}."),
            ("Which faculty did I attend?", "You were in {v}."),
        ),
        "Which subject did I study?",
        (
            ("Which exams did I sit as a student?", "Exams in {v}."),
            ("What could I teach from my student days?", "You could teach {v}."),
        ),
    ),
}

PHRASES: dict[Pool, dict[str, Phrases]] = {"test": _TEST, "train": _TRAIN}

ALONE: tuple[frozenset[str], ...] = (frozenset({"cat_name", "dog_name", "pet"}),)
"""Kinds of which one person has one at most: which of two animals a question means would not be clear."""

STYLES: dict[Pool, tuple[Style, ...]] = {
    "test": (
        Style(
            0,
            ("Hi.", "Me again.", "Quick note."),
            ("Also: ", "Next: "),
            ("Just so you know.", "That is all for now.", "No need to reply at length."),
            ("Hello once more.", "Short question.", "Back with questions."),
        ),
        Style(
            1,
            ("Good evening.", "I hope you are well.", "Thank you for your time."),
            ("In addition, ", "Furthermore, "),
            ("Kindly keep this in mind.", "I thought you should be informed.", "With best regards."),
            ("Good day to you.", "I would appreciate some help.", "May I trouble you once more?"),
        ),
        Style(
            2,
            ("Hey, good morning!", "So, guess what.", "Hello hello, how was your day?"),
            ("Oh, and by the way, ", "Come to think of it, "),
            ("Anyway, that is my news.", "Funny how things go.", "I do go on, I know."),
            ("Hey, it's me, quick one!", "Right, my head is a sieve.", "Help, I am lost today."),
        ),
        Style(
            1,
            ("Hooray, a new day!", "So much to tell!", "What a wonderful week!"),
            ("Listen, ", "Oh, "),
            ("Wow, I do talk a lot!", "There you have it!", "More soon!"),
            ("Let us play a game!", "Quiz time!", "Surprise me!"),
        ),
    ),
    "train": (
        Style(
            0,
            ("Morning.", "For the record.", "One more thing."),
            ("Then: ", "Also noted: "),
            ("End of message.", "Keep it on file.", "Nothing more."),
            ("A check.", "Tell me this.", "Some questions."),
        ),
        Style(
            1,
            ("Dear assistant.", "I trust this finds you well.", "Pardon the interruption."),
            ("Moreover, ", "Besides, "),
            ("I am obliged to you.", "That may be useful later.", "Yours sincerely."),
            ("Allow me to ask something.", "I have a small request.", "I should like to test you."),
        ),
        Style(
            2,
            ("Well, well, here I am.", "Phew, what a day I had.", "Are you there, my friend?"),
            ("What else, ah yes, ", "Before I forget, "),
            ("But enough about me.", "You know how it is.", "Never a dull moment here."),
            ("I am so forgetful, help me out.", "Oh dear, my memory.", "You again, how lovely."),
        ),
        Style(
            1,
            ("Yay, we can chat!", "I am full of energy!", "Today is brilliant!"),
            ("Oh yes, ", "Now hear this, "),
            ("More tomorrow!", "Bye for now!", "So there!"),
            ("Ready for a test?", "Go on, impress me!", "Let us see what you know!"),
        ),
    ),
}

REPLIES: dict[Pool, tuple[str, ...]] = {
    "test": (
        "Thanks for letting me know.",
        "Noted.",
        "Good to know, thank you.",
        "I see, that is helpful.",
        "Thank you for sharing that.",
        "That is worth knowing.",
        "Understood, I will keep it in mind.",
        "How interesting, tell me more some time.",
        "Got it.",
        "Thanks, I appreciate it.",
    ),
    "train": (
        "All right, I have written that down.",
        "Thank you, that helps me.",
        "I am glad you told me.",
        "Sure, I will remember.",
        "Okay, clear enough.",
        "Very well.",
        "Fine, I have got that.",
        "That tells me something about you.",
        "I have made a note.",
        "Great, anything else?",
    ),
}
"""What the listener says when it echoes nothing."""

__all__ = ["ALONE", "PHRASES", "REPLIES", "STYLES", "Phrases", "Style"]
