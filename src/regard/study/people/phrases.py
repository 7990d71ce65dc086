"""How facts are told, answered and asked for, in two pools that share no sentence.

In a phrase, {v} is the value, {a} the value with its article ("a tortoise"), {A} the same at the start
of a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from .words import Pool


@dataclass(frozen=True)
class Phrases:
    """One kind of fact: told in three lengths, repeated by the listener in a clause, asked for later in other words."""

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
        ("My name is {v}.", "Hello, my name is {v}.", "My name is {v}, and everybody uses it."),
        "your name is {v}",
        (
            ("Do you still know who I am?", "Your name is {v}."),
            ("Please say my name again.", "Your name is {v}."),
        ),
        "What is my name?",
    ),
    "city": Phrases(
        ("I live in {v}.", "The city I live in is {v}.", "We moved to {v} years ago, and it is still my city."),
        "you live in {v}",
        (
            ("Remind me of my home city.", "You live in {v}."),
            ("In which town is my home?", "Your home is in {v}."),
        ),
        "What is my city?",
    ),
    "job": Phrases(
        ("I work as {a}.", "I earn my living as {a}.", "I work as {a}, mostly on early shifts."),
        "your job is {v}",
        (
            ("What is my profession?", "You are {a}."),
            ("Remind me what my work is.", "You work as {a}."),
        ),
        "What is my job?",
    ),
    "cat_name": Phrases(
        (
            "I have a cat named {v}.",
            "I share the sofa with a cat named {v}.",
            "A stray cat adopted me last winter, and I named her {v}.",
        ),
        "your cat is called {v}",
        (
            ("Could you remind me what I named my cat?", "Your cat is {v}."),
            ("Who is my cat?", "Your cat is {v}."),
        ),
        "What is the name of my cat?",
    ),
    "dog_name": Phrases(
        (
            "I have a dog named {v}.",
            "There is a dog at home, and we named him {v}.",
            "We took in a dog that chews everything, and I named him {v}.",
        ),
        "your dog is called {v}",
        (
            ("Could you remind me what I named my dog?", "Your dog is {v}."),
            ("Who is my dog?", "Your dog is {v}."),
        ),
        "What is the name of my dog?",
    ),
    "pet": Phrases(
        ("I keep {a} as a pet.", "I have {a} as a pet, a gift from my uncle.", "You may laugh, but I keep {a} as a pet."),
        "your pet is {a}",
        (
            ("What kind of pet do I own?", "You keep {a}."),
            ("Remind me which pet lives with me.", "You keep {a}."),
        ),
        "What is my pet?",
    ),
    "sister": Phrases(
        (
            "I have a sister named {v}.",
            "I have one older sister, and she is named {v}.",
            "I grew up sharing a room with my sister {v}.",
        ),
        "your sister is called {v}",
        (
            ("Do you remember who my sister is?", "Your sister is {v}."),
            ("Who is my sister?", "Your sister is {v}."),
        ),
        "What is the name of my sister?",
    ),
    "brother": Phrases(
        (
            "I have a brother named {v}.",
            "I have a younger brother, and he is named {v}.",
            "It was my brother {v} who taught me to swim.",
        ),
        "your brother is called {v}",
        (
            ("Do you remember who my brother is?", "Your brother is {v}."),
            ("Who is my brother?", "Your brother is {v}."),
        ),
        "What is the name of my brother?",
    ),
    "daughter": Phrases(
        (
            "I have a daughter named {v}.",
            "I have a little daughter, and she is named {v}.",
            "Last night my daughter {v} read me a whole story.",
        ),
        "your daughter is called {v}",
        (
            ("Do you remember who my daughter is?", "Your daughter is {v}."),
            ("Who is my daughter?", "Your daughter is {v}."),
        ),
        "What is the name of my daughter?",
    ),
    "friend": Phrases(
        ("My best friend is {v}.", "The best friend I have is {v}.", "If I need to laugh I ring {v}, my best friend."),
        "your best friend is called {v}",
        (
            ("Remind me which friend is closest to me.", "Your best friend is {v}."),
            ("Who is the friend I trust most?", "Your best friend is {v}."),
        ),
        "What is the name of my best friend?",
    ),
    "boss": Phrases(
        (
            "I have a boss named {v}.",
            "I have a new boss, who is named {v}.",
            "My boss is {v}, who wants all of us in by eight.",
        ),
        "your boss is called {v}",
        (
            ("Do you remember who my boss is?", "Your boss is {v}."),
            ("Who is my boss?", "Your boss is {v}."),
        ),
        "What is the name of my boss?",
    ),
    "food": Phrases(
        ("My favourite food is {v}.", "The food I love to eat is {v}.", "On Fridays I eat {v}, my favourite food."),
        "your favourite food is {v}",
        (
            ("Which dish do I like to eat?", "You eat {v}."),
            ("What do I eat on good days?", "You eat {v}."),
        ),
        "What is my favourite food?",
    ),
    "allergy": Phrases(
        ("I am allergic to {v}.", "My doctor says that I am allergic to {v}.", "I carry tablets because I am allergic to {v}."),
        "you are allergic to {v}",
        (
            ("Which allergy do I have?", "Your allergy is to {v}."),
            ("Remind me of my allergy.", "Your allergy is to {v}."),
        ),
        "What am I allergic to?",
    ),
    "hobby": Phrases(
        (
            "I have a hobby, {v}.",
            "The hobby that fills my evenings is {v}.",
            "A cousin showed me how, and now my great hobby is {v}.",
        ),
        "your hobby is {v}",
        (
            ("Remind me which hobby I have.", "Your hobby is {v}."),
            ("Which hobby fills my time?", "Your hobby is {v}."),
        ),
        "What is my hobby?",
    ),
    "instrument": Phrases(
        ("I play the {v}.", "The instrument I play is the {v}.", "The neighbours complain whenever I play the {v} after ten."),
        "you play the {v}",
        (
            ("Remind me of my instrument.", "Your instrument is the {v}."),
            ("On which instrument do I make music?", "Your instrument is the {v}."),
        ),
        "What is my instrument?",
    ),
    "sport": Phrases(
        ("I train for {v}, my sport.", "The sport I train for is {v}.", "Three of us joined a club, and our sport is {v}."),
        "your sport is {v}",
        (
            ("For which sport do I train?", "You train for {v}."),
            ("Remind me what my training is.", "You train for {v}."),
        ),
        "What is my sport?",
    ),
    "bike_colour": Phrases(
        ("I ride {a} bike.", "I have just painted my bike {v}.", "I ride {a} bike that somebody has scratched."),
        "your bike is {v}",
        (
            ("How is my bike painted?", "Your bike is {v}."),
            ("Remind me of the colour of my bike.", "Your bike is {v}."),
        ),
        "What colour is my bike?",
    ),
    "favourite_colour": Phrases(
        ("My favourite colour is {v}.", "The colour I prefer is {v}.", "Half of what I wear is {v}, my favourite colour."),
        "your favourite colour is {v}",
        (
            ("Which colour do I choose?", "You prefer {v}."),
            ("Could you name the colour I love?", "You prefer {v}."),
        ),
        "What is my favourite colour?",
    ),
    "author": Phrases(
        (
            "My favourite author is {v}.",
            "The author I love to read is {v}.",
            "I have read everything by {v}, my favourite author.",
        ),
        "your favourite author is {v}",
        (
            ("Whose books do I take along?", "You read {v}."),
            ("Which writer is on my shelf?", "You read {v}."),
        ),
        "Who is my favourite author?",
    ),
    "language": Phrases(
        ("I am learning {v}.", "The language I am learning is {v}.", "I am learning {v}, a language that drives me mad."),
        "you are learning {v}",
        (
            ("Which foreign language do I study?", "You are learning {v}."),
            ("Remind me of the language I study.", "You are learning {v}."),
        ),
        "Which language am I learning?",
    ),
    "drink": Phrases(
        (
            "I always order {v}, my favourite drink.",
            "The drink I like best is {v}.",
            "The waiter knows that I always order {v}, my favourite drink.",
        ),
        "your favourite drink is {v}",
        (
            ("Which drink should I have?", "You order {v}."),
            ("What do I order at the bar?", "You order {v}."),
        ),
        "What is my favourite drink?",
    ),
    "street": Phrases(
        ("I live on {v}.", "The street I live on is {v}.", "Our house is the narrow one on {v}, a quiet street."),
        "your street is {v}",
        (
            ("Remind me where my house is.", "You live on {v}."),
            ("Please tell me my street again.", "You live on {v}."),
        ),
        "What is my street?",
    ),
    "fear": Phrases(
        ("I am afraid of {v}.", "I have always been afraid of {v}.", "I nearly fainted yesterday, because I am afraid of {v}."),
        "your fear is {v}",
        (
            ("What scares me?", "You are afraid of {v}."),
            ("Remind me of my greatest fear.", "You are afraid of {v}."),
        ),
        "What is my fear?",
    ),
    "trip": Phrases(
        (
            "I am going on holiday to {v}.",
            "I have booked a holiday in {v}.",
            "We are saving up all year for our holiday in {v}.",
        ),
        "your holiday is in {v}",
        (
            ("Where will my next trip take me?", "You are going to {v}."),
            ("Which trip have I booked?", "You are going to {v}."),
        ),
        "Where is my holiday?",
    ),
    "subject": Phrases(
        (
            "I studied {v} at university.",
            "At university I took a degree in {v}.",
            "I studied {v} for four years and do not regret it.",
        ),
        "your degree is in {v}",
        (
            ("In which subject is my degree?", "You have a degree in {v}."),
            ("Remind me of my degree.", "You have a degree in {v}."),
        ),
        "What is my degree in?",
    ),
}

_TRAIN: dict[str, Phrases] = {
    "name": Phrases(
        ("My full name is {v}.", "You can call me {v}.", "My parents gave me the name {v}, and I have kept it."),
        "you are {v}",
        (
            ("How would you address me?", "You are {v}."),
            ("Can you tell me who is talking?", "You are {v}."),
        ),
        "What am I called?",
        (
            ("Sign this letter for me.", "You are called {v}."),
            ("Which name belongs on my badge?", "The name is {v}."),
        ),
    ),
    "city": Phrases(
        ("I'm based in {v}.", "My home city is {v}.", "For ten years now my home has been in {v}, close to the river."),
        "your home is {v}",
        (
            ("Which city is mine?", "Your home city is {v}."),
            ("Tell me where I live.", "Your home is {v}."),
        ),
        "Which city is my home?",
        (
            ("Where is my flat?", "Your flat is in {v}."),
            ("In which city do I stay?", "The city is {v}."),
        ),
    ),
    "job": Phrases(
        ("My job is {v}.", "I am employed as {a}.", "After a long search they hired me as {a}, and it is a good job."),
        "your work is {v}",
        (
            ("Can you tell me my job?", "Your job is that of {a}."),
            ("I forgot my own job.", "Your job is {v}."),
        ),
        "What do I do for work?",
        (
            ("How do I make money?", "Your work is {v}."),
            ("Which line of work am I in?", "The work is {v}."),
        ),
    ),
    "cat_name": Phrases(
        ("My cat is {v}.", "The cat in my kitchen is {v}.", "Yesterday my cat {v} climbed all the way up the curtains."),
        "your cat is {v}",
        (
            ("Can you tell me how my cat is called?", "Your cat is called {v}."),
            ("I forgot the name of my cat.", "Your cat is called {v}."),
        ),
        "What is my cat called?",
        (
            ("Would you name my cat for me?", "Your cat is named {v}."),
            ("Tell me about my cat.", "The cat is {v}."),
        ),
    ),
    "dog_name": Phrases(
        ("My dog is {v}.", "The dog in my garden is {v}.", "Yesterday my dog {v} stole a whole cake."),
        "your dog is {v}",
        (
            ("Can you tell me how my dog is called?", "Your dog is called {v}."),
            ("I forgot the name of my dog.", "Your dog is called {v}."),
        ),
        "What is my dog called?",
        (
            ("Would you name my dog for me?", "Your dog is named {v}."),
            ("Tell me about my dog.", "The dog is {v}."),
        ),
    ),
    "pet": Phrases(
        ("My pet is {a}.", "The pet in my room is {a}.", "A neighbour gave me {a} to mind, and now it is my pet."),
        "you own {a} as a pet",
        (
            ("Can you tell me my kind of pet?", "You own {a}."),
            ("I forgot which pet is mine.", "You own {a}."),
        ),
        "Which pet do I own?",
        (
            ("What animal do I look after?", "The animal is {a}."),
            ("Which creature is in my house?", "The pet is {a}."),
        ),
    ),
    "sister": Phrases(
        ("My sister is {v}.", "I am meeting my big sister {v} at noon.", "The clever one in our family is my sister {v}."),
        "your sister is {v}",
        (
            ("Can you tell me how my sister is called?", "Your sister is called {v}."),
            ("I forgot the name of my sister.", "Your sister is called {v}."),
        ),
        "What is my sister called?",
        (
            ("Would you name my sister for me?", "Your sister is named {v}."),
            ("Tell me about my sister.", "The sister is {v}."),
        ),
    ),
    "brother": Phrases(
        (
            "My brother is {v}.",
            "I lent some money to my brother {v}.",
            "Every summer I go camping with my brother {v} and his tent.",
        ),
        "your brother is {v}",
        (
            ("Can you tell me how my brother is called?", "Your brother is called {v}."),
            ("I forgot the name of my brother.", "Your brother is called {v}."),
        ),
        "What is my brother called?",
        (
            ("Would you name my brother for me?", "Your brother is named {v}."),
            ("Tell me about my brother.", "The brother is {v}."),
        ),
    ),
    "daughter": Phrases(
        ("My daughter is {v}.", "I am proud of my daughter {v}.", "I am up late again since my daughter {v} has a cold."),
        "your daughter is {v}",
        (
            ("Can you tell me how my daughter is called?", "Your daughter is called {v}."),
            ("I forgot the name of my daughter.", "Your daughter is called {v}."),
        ),
        "What is my daughter called?",
        (
            ("Would you name my daughter for me?", "Your daughter is named {v}."),
            ("Tell me about my daughter.", "The daughter is {v}."),
        ),
    ),
    "friend": Phrases(
        (
            "My dearest friend is {v}.",
            "I spend a lot of time with {v}, my best friend.",
            "No friend has stood by me for as long as {v}, my best friend.",
        ),
        "your best friend is {v}",
        (
            ("Can you tell me how my best friend is called?", "Your best friend is called {v}."),
            ("I forgot the name of my best friend.", "Your best friend is called {v}."),
        ),
        "What is my best friend called?",
        (
            ("Would you name my best friend for me?", "Your best friend is named {v}."),
            ("Tell me about my best friend.", "The best friend is {v}."),
        ),
    ),
    "boss": Phrases(
        ("My boss is {v}.", "I am afraid my boss {v} is strict.", "My boss {v} sent us all home early today."),
        "your boss is {v}",
        (
            ("Can you tell me how my boss is called?", "Your boss is called {v}."),
            ("I forgot the name of my boss.", "Your boss is called {v}."),
        ),
        "What is my boss called?",
        (
            ("Would you name my boss for me?", "Your boss is named {v}."),
            ("Tell me about my boss.", "The boss is {v}."),
        ),
    ),
    "food": Phrases(
        (
            "The food I like best is {v}.",
            "If you invite me, please serve {v}, the food I like most.",
            "My grandmother spoiled me with {v}, still the food I like best.",
        ),
        "you like {v} best",
        (
            ("Can you tell me what I like to eat?", "You like {v}."),
            ("I forgot which food I like.", "You like {v}."),
        ),
        "Which food do I like most?",
        (
            ("What would please me at dinner?", "You would like {v}."),
            ("Which food should I cook?", "The food is {v}."),
        ),
    ),
    "allergy": Phrases(
        (
            "I have an allergy to {v}.",
            "The tests found an allergy to {v}.",
            "I was ill as a child because of my allergy to {v}.",
        ),
        "you have an allergy to {v}",
        (
            ("Can you tell me what I am allergic to?", "You are allergic to {v}."),
            ("I forgot what makes me ill.", "You are allergic to {v}."),
        ),
        "What do I have an allergy to?",
        (
            ("Which allergy must I mention?", "The allergy is {v}."),
            ("What is dangerous for me?", "You must avoid {v}."),
        ),
    ),
    "hobby": Phrases(
        ("My hobby is {v}.", "I relax with my hobby, {v}.", "My partner laughs at my hobby, which is {v}."),
        "you enjoy {v}",
        (
            ("Can you tell me how I spend evenings?", "You enjoy {v}."),
            ("I forgot what I enjoy.", "You enjoy {v}."),
        ),
        "Which hobby do I have?",
        (
            ("Which hobby did I choose?", "You chose {v}."),
            ("What is that hobby I have?", "The hobby is {v}."),
        ),
    ),
    "instrument": Phrases(
        (
            "My instrument is the {v}.",
            "I take lessons on the {v}, my instrument.",
            "At the weekend I performed on my instrument, the {v}.",
        ),
        "your instrument is the {v}",
        (
            ("Can you tell me what I play?", "You play the {v}."),
            ("I forgot which instrument is mine.", "You play the {v}."),
        ),
        "What instrument can I play?",
        (
            ("What is in my music case?", "The instrument is the {v}."),
            ("What did I learn to play?", "You learned the {v}."),
        ),
    ),
    "sport": Phrases(
        (
            "My sport is {v}.",
            "I compete in my sport, {v}, at a modest level.",
            "My doctor told me to do a sport, and I picked {v}.",
        ),
        "you do {v}",
        (
            ("Can you tell me which sport I do?", "You do {v}."),
            ("I forgot which sport I like.", "You do {v}."),
        ),
        "What sport do I do?",
        (
            ("What does my coach teach me?", "You train in {v}."),
            ("Which sport am I good at?", "The sport is {v}."),
        ),
    ),
    "bike_colour": Phrases(
        ("My bike is {v}.", "The colour of my bike is {v}.", "The shop had one bike left, in {v}, and I bought it."),
        "the bike is {v}",
        (
            ("Can you describe my bike?", "You have {a} bike."),
            ("I forgot which bike is mine.", "You have {a} bike."),
        ),
        "Which colour does my bike have?",
        (
            ("Which bike do I ride?", "You ride {a} bike."),
            ("What paint does my bike need?", "The bike is {v}."),
        ),
    ),
    "favourite_colour": Phrases(
        ("The colour I love is {v}.", "No colour suits me like {v}.", "I had the kitchen done in {v}, the colour I love."),
        "the colour you love is {v}",
        (
            ("Can you tell me the colour I like?", "The colour is {v}."),
            ("I forgot my favourite colour.", "The colour is {v}."),
        ),
        "Which colour do I like best?",
        (
            ("What should I paint the wall?", "You like {v} walls."),
            ("Which colour is best for me?", "Your colour is {v}."),
        ),
    ),
    "author": Phrases(
        (
            "The author I love is {v}.",
            "On my night table lies my best author, {v}.",
            "Our teacher made us read {v}, now the author I love.",
        ),
        "you like reading {v}",
        (
            ("Can you tell me whom I like to read?", "You like reading {v}."),
            ("I forgot which author I love.", "You like reading {v}."),
        ),
        "Which author do I like most?",
        (
            ("Who wrote the novels on my shelf?", "The author is {v}."),
            ("Which author is mine?", "Your author is {v}."),
        ),
    ),
    "language": Phrases(
        ("I study {v} as a language.", "I bought a language course in {v}.", "My in-laws speak {v}, so I study that language."),
        "you study {v}",
        (
            ("Can you tell me what I am learning?", "You study {v}."),
            ("I forgot which language I learn.", "You study {v}."),
        ),
        "What language do I study?",
        (
            ("What is my tutor teaching me?", "You learn {v}."),
            ("Which language is on my cards?", "The language is {v}."),
        ),
    ),
    "drink": Phrases(
        (
            "The drink I love is {v}.",
            "When I am thirsty, the drink I take is {v}.",
            "There are nine bottles of {v} in my fridge, the drink I love.",
        ),
        "you drink {v}",
        (
            ("Can you tell me what I drink?", "You drink {v}."),
            ("I forgot which drink is mine.", "You drink {v}."),
        ),
        "Which drink do I like most?",
        (
            ("What should the host pour me?", "You want {v}."),
            ("Which drink is for me?", "The drink is {v}."),
        ),
    ),
    "street": Phrases(
        ("My street is {v}.", "My house stands on {v}.", "They are digging up {v}, the street where I live."),
        "your house is on {v}",
        (
            ("Can you tell me my address?", "Your street is {v}."),
            ("I forgot where I live.", "Your street is {v}."),
        ),
        "What is the name of my street?",
        (
            ("Where is my front door?", "The street is {v}."),
            ("Which address is mine?", "Your address is {v}."),
        ),
    ),
    "fear": Phrases(
        ("My great fear is {v}.", "What I fear is {v}.", "My children think it funny that I fear {v}."),
        "you fear {v}",
        (
            ("Can you tell me what frightens me?", "You fear {v}."),
            ("I forgot what I am scared of.", "You fear {v}."),
        ),
        "What is my greatest fear?",
        (
            ("What do I run away from?", "You run from {v}."),
            ("Which fear do I have?", "The fear is {v}."),
        ),
    ),
    "trip": Phrases(
        (
            "My next holiday is in {v}.",
            "I am counting the days until my holiday in {v}.",
            "My suitcase is packed for a holiday in {v}.",
        ),
        "you will see {v}",
        (
            ("Can you tell me where I will fly?", "You will travel to {v}."),
            ("I forgot where my holiday is.", "You will travel to {v}."),
        ),
        "Where will I travel next?",
        (
            ("Which country will I see?", "You will see {v}."),
            ("Which map should I buy?", "The trip is to {v}."),
        ),
    ),
    "subject": Phrases(
        (
            "I have a degree in {v}.",
            "At college I chose a degree in {v}.",
            "My father wanted a lawyer, but my degree is in {v}.",
        ),
        "you have studied {v}",
        (
            ("Can you tell me what I studied?", "You studied {v}."),
            ("I forgot what my degree is in.", "You studied {v}."),
        ),
        "Which subject did I study?",
        (
            ("What did I learn at college?", "You learned {v}."),
            ("Which degree do I hold?", "The degree is {v}."),
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
    "test": ("noted", "I see", "I will keep it in mind"),
    "train": ("understood", "good to know", "I will remember that"),
}
"""What the listener adds where it repeats one fact alone."""

__all__ = ["ALONE", "PHRASES", "REPLIES", "STYLES", "Phrases", "Style"]
