"""What people may be called, keep, like and fear: one list of values for each kind of fact, in two pools that share nothing."""

from __future__ import annotations

from typing import Literal

Pool = Literal["train", "test"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(",") if word.strip())


_TEST_GIRLS = _words(
    """Ilse Wilhelmina, Noor Rasheeda, Petra Ludmila, Saoirse Aoife, Imani Wanjiru, Lucia Beatriz, Freya Ragnhild, Anouk
    Mathurine, Zofia Kazimiera, Hana Naledi, Marguerite Apolline, Tamsin Perpetua, Rosalind Hermione, Ines Dolores,
    Kerstin Sieglinde, Leocadia Eulalia, Priya Sunita, Odile Clothilde, Bronwen Myfanwy, Mirela Anca, Agatha
    Millicent, Yuki Sayuri, Delphine Eugenie, Svetlana Larisa"""
)
_TEST_COLOURS = _words(
    """dusty scarlet, pale turquoise, smoky lavender, muddy olive, warm ivory, polished copper, loud magenta, dull navy,
    glowing amber, frosty mint, deep burgundy, faded lilac, matt charcoal, creamy peach, dark emerald, brushed silver, earthy ochre,
    midnight indigo, ripe plum, sour lemon, sandy khaki, flaky rust, bright sapphire, tender salmon"""
)
_TRAIN_GIRLS = _words(
    """Beatrix, Amara, Helga, Niamh, Solveig, Paloma, Greta, Camille, Danuta, Emiko, Josephine, Morwenna, Cordelia, Pilar,
    Annika, Seraphina, Lakshmi, Colette, Carys, Ioana, Winifred, Sakura, Genevieve, Oksana"""
)
_TRAIN_COLOURS = _words(
    """fierce crimson, murky teal, soft violet, sharp lime, plain beige, antique bronze, shocking pink, vivid cobalt, burnt orange,
    milky jade, rich maroon, misty mauve, jet black, sunny apricot, mossy green, shiny golden, chalky white, royal purple,
    chocolate brown, mustardy yellow, leathery tan, stormy grey, icy blue, tropical coral"""
)

VALUES: dict[Pool, dict[str, tuple[str, ...]]] = {
    "test": {
        "name": _words(
            """Mara Fenwick, Tavi Oduya, Oskar Brandt, Wren Holloway, Kofi Asante, Elowen Trevanion, Dmitri Volkov, Sunniva
            Lindahl, Rafael Mendoza, Juno Achterberg, Anselm Kessler, Nadia Haddad, Thaddeus Winterbourne, Keiko Fujimoto,
            Bastian Drechsler, Liora Mizrahi, Emrys Pryce, Chidi Nwosu, Fenella Garrity, Gideon Stern, Isolde Valcourt, Joaquin
            Ibarra, Katya Sokolova, Lorcan Brannigan, Maelle Kerjean, Nikhil Desai, Ottilie Rasmussen, Pascal Lefevre, Quilla
            Huaman, Rowan Ashby, Selma Engel, Tobiah Kirsch, Una Corrigan, Viggo Halvorsen, Willa Prescott, Xanthe Drakos,
            Yorick Skovgaard, Zelda Sondergaard, Alaric Ostrander, Brielle Delacroix, Caspian Marchbanks, Dalia Khoury, Evander
            Petrakis, Farah Aziz, Gwendal Kervella, Harriet Lockhart, Ignacio Urrutia, Jorunn Tveit"""
        ),
        "city": _words(
            """Lisbon, Ghent, Tromso, Valencia, Krakow, Cardiff, Osaka, Nairobi, Montreal, Ljubljana, Porto Alegre, Tbilisi,
            Adelaide, Bologna, Utrecht, Seville, Aarhus, Quito, Leipzig, Galway, Hanoi, Marseille, Tartu, Savannah, Dundee,
            Muscat"""
        ),
        "job": _words(
            """beekeeper, tram driver, optician, stonemason, librarian, translator, paramedic, glassblower, surveyor, florist,
            electrician, clockmaker, museum guard, locksmith, midwife, baker, cartographer, sailmaker, radio host,
            tax adviser, veterinarian, upholsterer, illustrator, harbour master, forester, pharmacist"""
        ),
        "cat_name": _words(
            """Mochi Moonbeam, Bramble Thornton, Pickles Vinegar, Saffron Sundae, Ziggy Stardust, Tofu Jitterbug, Marmalade
            Whiskerton, Inky Blotch, Duchess Pompadour, Waffles Syrup, Nutmeg Gingersnap, Gizmo Gadget, Clementine Mandarin,
            Smudge Figgins, Pumpkin Jackson, Quince Marzipan, Cleopatra Ptolemy, Button Popper, Figaro Barber,
            Biscotti Crumble, Velvet Slipper, Noodle Dumplington, Ember Ashes, Thimble Needlework"""
        ),
        "dog_name": _words(
            """Rufus Ironside, Baxter Wigglesworth, Tilly Teacup, Captain Barnacle, Hazelnut Crunch, Bandit Moonshine, Moose
            Antlers, Acorn Oakley, Otto Bismarck, Pepper Peppercorn, Scout Pathfinder, Barnaby Rudge, Maple Leafy, Fergus
            McGraw, Rocket Booster, Dumpling Gravy, Hector Trojan, Skipper Bluejacket, Truffle Bonbon, Monty
            Pemberley, Biscuit Barkley, Bagel Schmear, Winston Longpaw, Pretzel Twist"""
        ),
        "pet": _words(
            """tortoise, parrot, hedgehog, chinchilla, gecko, ferret, canary, iguana, hamster, cockatoo, donkey, axolotl,
            python, goose, alpaca, newt, budgerigar, tarantula, pony, chameleon, degu, stick insect, guinea fowl, koi"""
        ),
        "sister": _TEST_GIRLS,
        "daughter": _TEST_GIRLS,
        "brother": _words(
            """Henrik Valdemar, Matteo Lorenzo, Kwame Kwabena, Declan Fintan, Ruben Baruch, Stellan Sixten, Idris Jamal, Lucas
            Horatio, Bartosz Zdzislaw, Kenji Ryota, Florian Leopold, Piran Jory, Auberon Lancelot, Diego Ramon, Anders Bjarne,
            Zebulon Obadiah, Arjun Vikram, Thibault Gauthier, Gethin Emlyn, Radu Tudor, Cuthbert Aloysius, Haruki Minoru,
            Marcel Anatole, Pavel Grigori"""
        ),
        "friend": _words(
            """Linden Ardizzone, Robin Bellamy, Sasha Cvetkov, Quinn Drummond, Marlowe Eriksen, Jules Fairweather, Emerson
            Grabowski, Kit Hinojosa, Lennox Ivarsson, Arden Jellicoe, Billie Kruger, Darcy Lombardi, Ellis Mukherjee, Frankie
            Nightingale, Hollis Oyelaran, Auden Pettigrew, Jody Quintero, Larkin Ravensdale, Merritt Sandoval, Nico Tollemache,
            Perry Umarov, Reese Vasquez, Shiloh Westerberg, Tatum Yamamoto"""
        ),
        "boss": _words(
            """Ngozi Okafor, Astrid Lindqvist, Bridget Halloran, Gino Castellano, Percival Pemberton, Akira Nakamura, Joost
            Vandermeer, Hamish Abernathy, Zbigniew Szymanski, Antoine Deveraux, Clive Thornbury, Halina Kowalczyk, Maeve
            Gallagher, Thabo Mbeki, Miriam Rosenthal, Stavroula Papadakis, Ingvar Strand, Prudence Whitlock, Solange Fontaine,
            Ravi Iyer, Consuelo Castaneda, Leif Bjornson, Mildred Hargreaves, Esteban Zamora"""
        ),
        "food": _words(
            """ramen, lasagne, falafel, paella, pierogi, mushroom risotto, fish pie, goulash, nasi goreng, moussaka, tamales,
            lentil soup, gnocchi, dim sum, ratatouille, jollof rice, shepherd's pie, bibimbap, borscht, fajitas, onion tart,
            chicken korma, pancakes, spinach quiche"""
        ),
        "allergy": _words(
            """peanuts, latex, kiwi, sesame seeds, bee stings, penicillin, shellfish, birch pollen, strawberries, nickel,
            celery, walnuts, wool, ragweed, mango, lupin, aspirin, dust mites, mustard seeds, soy, pineapple, lanolin,
            cologne, hay"""
        ),
        "hobby": _words(
            """pottery, birdwatching, origami, knitting, stargazing, chess, calligraphy, bookbinding, juggling, woodcarving,
            model trains, beachcombing, quilting, stand-up comedy, metal detecting, candle making, crossword puzzles,
            kite building, tap dancing, soap making, mushroom foraging, stamp collecting, watch repair, ballroom dancing"""
        ),
        "instrument": _words(
            """cello, oboe, accordion, banjo, harp, trombone, mandolin, bassoon, marimba, sitar, tuba, ukulele, viola,
            bagpipes, theremin, double bass, piccolo, dulcimer, church organ, French horn, steel drum, recorder, bongos, lute"""
        ),
        "sport": _words(
            """rowing, fencing, badminton, water polo, judo, archery, squash, curling, netball, rock climbing, lacrosse,
            cricket, triathlon, trampolining, handball, sailing, karate, snooker, speed skating, bowls, hurling, kayaking,
            roller derby, ping-pong"""
        ),
        "bike_colour": _TEST_COLOURS,
        "favourite_colour": _TEST_COLOURS,
        "author": _words(
            """Tolstoy, Austen, Borges, Murakami, Steinbeck, Atwood, Calvino, Woolf, Achebe, Christie, Kafka, Le Guin, Ishiguro,
            Pratchett, Neruda, Melville, Morrison, Saramago, Simenon, Wodehouse, Asimov, Lindgren, Zola, Chekhov"""
        ),
        "language": _words(
            """Welsh, Finnish, Swahili, Korean, Portuguese, Greek, Icelandic, Turkish, Hindi, Catalan, Estonian, Maltese,
            Tagalog, Czech, Basque, Zulu, Thai, Persian, Serbian, Danish, Quechua, Tamil, Mongolian, Lao"""
        ),
        "drink": _words(
            """oat milk, ginger ale, fennel tea, hot chocolate, salted lassi, tomato juice, espresso, dry cider,
            iced matcha, rooibos, elderflower cordial, strong coffee, kombucha, lemonade, chai, cranberry juice, buttermilk,
            tonic water, malted milk, guava nectar, barley water, jasmine tea, root beer, horchata"""
        ),
        "street": _words(
            """Juniper Lane, Harbour Row, Tanner Street, Alder Close, Mill Road, Observatory Hill, Cooper Street, Quarry Lane,
            Lantern Court, Saint Anne Square, Weaver Street, Orchard Rise, Falcon Avenue, Bridge Terrace, Clover Way,
            Magpie Lane, Station Parade, Thistle Grove, Admiral Street, Ferry Road, Pewter Alley, Hawthorn Walk,
            Beacon Street, Foundry Yard"""
        ),
        "fear": _words(
            """spiders, thunderstorms, heights, deep water, moths, lifts, needles, clowns, escalators, wasps, flying,
            the dark, mice, crowds, dentists, tunnels, snakes, puppets, bats, cellars, fireworks, jellyfish, pigeons,
            suspension bridges"""
        ),
        "trip": _words(
            """Iceland, Patagonia, Malta, Namibia, Vietnam, the Azores, Corsica, Bhutan, Uruguay, Lapland, Zanzibar, Tasmania,
            Armenia, the Hebrides, Costa Rica, Kerala, Sardinia, Alaska, Jordan, Madeira, Borneo, Provence, Senegal,
            the Dolomites"""
        ),
        "subject": _words(
            """geology, linguistics, music theory, astronomy, anthropology, law, botany, economics, theology, statistics,
            film studies, oceanography, philosophy, nursing, archaeology, marketing, Latin, robotics, zoology, dentistry,
            town planning, biochemistry, printmaking, meteorology"""
        ),
    },
    "train": {
        "name": _words(
            """Alma Bellweather, Benedikt Krause, Corin Tregenza, Dorothea Ackermann, Eamon Rafferty, Fiora Bianchi, Gustav
            Lindholm, Hestia Papageorgiou, Iker Etxeberria, Jessamy Wycliffe, Kalinda Chatterjee, Leander Vogel, Mireille
            Dubois, Nestor Kastellanos, Ondine Marceau, Peregrine Thistlewood, Rhiannon Llewellyn, Silvan Horvath, Tamar
            Shapiro, Ulrich Zimmermann, Valeria Montoya, Wendell Crabtree, Ximena Villanueva, Yusuf Demir, Zinnia Greenhalgh,
            Ambrose Fitzroy, Blythe Harkness, Cyprian Benvenuti, Desta Tesfaye, Elio Ricci, Florentine Duchamp, Garrick
            Hollister, Hyacinth Merriweather, Ivo Novak, Jacinta Saavedra, Kasimir Wojcik, Lavinia Pallister, Magnus Thorsen,
            Nerys Gwynne, Orson Underhill, Philippa Carruthers, Ramiro Escobar, Sybil Lovelace, Tancred Brackenbury, Ursula
            Schreiber, Verity Goodfellow, Wolfgang Reinhardt, Zacharias Katsaros"""
        ),
        "city": _words(
            """Bergen, Antwerp, Granada, Gdansk, Swansea, Kyoto, Kampala, Halifax, Zagreb, Recife, Yerevan, Hobart, Turin,
            Groningen, Malaga, Odense, Bogota, Dresden, Limerick, Da Nang, Toulouse, Riga, Memphis, Aberdeen, Amman, Basel"""
        ),
        "job": _words(
            """plumber, bus mechanic, dental nurse, carpenter, archivist, interpreter, firefighter, goldsmith, bricklayer,
            gardener, welder, wig maker, park warden, tailor, physiotherapist, pastry chef, draughtsman, ferry pilot,
            journalist, bookkeeper, zookeeper, roofer, animator, train dispatcher, fisherman, chemist"""
        ),
        "cat_name": _words(
            """Pixel, Whiskey, Parsley, Paprika, Sputnik, Miso, Toffee, Shadow, Countess, Crumpet, Cinnamon, Widget,
            Tangerine, Patches, Turnip, Poppyseed, Nefertiti, Domino, Rigoletto, Macaroon, Satin, Dumbo, Cinder, Bobbin"""
        ),
        "dog_name": _words(
            """Bruno, Duke, Rosie, Major, Conker, Rascal, Bosun, Heather, Fritz, Tansy, Ranger, Digby, Willow, Angus,
            Comet, Nugget, Ajax, Sailor, Brownie, Archie, Fiddle, Crouton, Churchill, Bratwurst"""
        ),
        "pet": _words(
            """rabbit, cockatiel, guinea pig, rat, bearded dragon, mink, finch, salamander, gerbil, macaw, mule, goldfish,
            corn snake, duck, llama, frog, parakeet, scorpion, goat, skink, mouse, praying mantis, peacock, turtle"""
        ),
        "sister": _TRAIN_GIRLS,
        "daughter": _TRAIN_GIRLS,
        "brother": _words(
            """Soren, Giovanni, Obinna, Cormac, Elias, Torsten, Karim, Matthias, Wojciech, Daichi, Sebastian, Jago, Lysander,
            Alvaro, Mikkel, Ezekiel, Rohan, Bertrand, Rhodri, Mihai, Mortimer, Takeshi, Gaston, Yuri"""
        ),
        "friend": _words(
            """Alex Abbott, Charlie Birkeland, Dana Calloway, Casey Dimitrov, Monroe Esposito, Toni Featherstone, Blair Guillaume,
            Sam Hashimoto, Sutton Ingram, Briar Jankowski, Bobbie Kaminski, Devon Lachlan, Emery Mahoney, Gray Norwood, Harper
            Oberlin, Jamie Petrov, Kendall Quimby, Logan Rochester, Micah Sinclair, Noel Tremblay, Parker Upton, Remy Vidal,
            Skyler Wakefield, Vesper Yeats"""
        ),
        "boss": _words(
            """Folake Adeyemi, Gunnar Bergstrom, Siobhan Callahan, Paolo Marchetti, Reginald Wetherby, Noriko Tanaka, Wim Dekker,
            Morag Crichton, Stanislaw Wisniewski, Yvette Beaumont, Gerald Ashdown, Agnieszka Nowak, Kieran Donnelly, Lindiwe
            Dlamini, Esther Goldberg, Kostas Stavros, Dagny Lund, Rupert Fairfax, Mathilde Moreau, Anil Banerjee, Rosario
            Figueroa, Sigrun Olafson, Edmund Blackwood, Ramona Salazar"""
        ),
        "food": _words(
            """pho, carbonara, hummus, gazpacho, potato dumplings, barley stew, fishcakes, schnitzel, massaman curry, stuffed peppers,
            enchiladas, pea soup, ravioli, spring rolls, cassoulet, groundnut stew, cottage pie, kimchi stew, cabbage rolls,
            burritos, cheese fondue, butter chicken, apple strudel, leek omelette"""
        ),
        "allergy": _words(
            """hazelnuts, cashews, avocado, poppy seeds, wasp venom, ibuprofen, crab, grass pollen, raspberries, chrome, parsnip,
            pecans, feathers, mugwort, papaya, chickpeas, codeine, mould, fenugreek, wheat, bananas, beeswax, hair dye,
            sunscreen"""
        ),
        "hobby": _words(
            """embroidery, beekeeping, paper cutting, crochet, ham radio, backgammon, sketching, letterpress printing, magic tricks,
            whittling, model ships, fossil hunting, weaving, improv theatre, geocaching, basket making, jigsaw puzzles,
            drone racing, salsa dancing, perfume blending, orchid growing, coin collecting, clock restoration, line dancing"""
        ),
        "instrument": _words(
            """violin, clarinet, concertina, guitar, zither, trumpet, bouzouki, saxophone, xylophone, tabla, euphonium, harmonica,
            piano, flute, synthesizer, washboard, tin whistle, autoharp, harpsichord, cornet, snare drum, ocarina, djembe,
            balalaika"""
        ),
        "sport": _words(
            """swimming, boxing, tennis, field hockey, taekwondo, darts, volleyball, ice hockey, basketball, orienteering, rugby,
            baseball, cross-country running, gymnastics, football, windsurfing, wrestling, billiards, figure skating, golf,
            softball, canoeing, skateboarding, padel"""
        ),
        "bike_colour": _TRAIN_COLOURS,
        "favourite_colour": _TRAIN_COLOURS,
        "author": _words(
            """Dostoevsky, Dickens, Cortazar, Mishima, Hemingway, Munro, Eco, Mansfield, Soyinka, Sayers, Mann, Tolkien, Mantel, Adams,
            Lorca, Conrad, Baldwin, Pessoa, Chandler, Sagan, Clarke, Jansson, Flaubert, Gogol"""
        ),
        "language": _words(
            """Irish, Norwegian, Yoruba, Japanese, Spanish, Hebrew, Faroese, Arabic, Bengali, Galician, Latvian, Italian, Malay,
            Polish, Breton, Xhosa, Vietnamese, Armenian, Croatian, Swedish, Guarani, Telugu, Kazakh, Khmer"""
        ),
        "drink": _words(
            """malt coffee, ginger beer, nettle tea, warm cocoa, banana milk, carrot juice, filter coffee, pear cider, iced coffee,
            chamomile tea, rose cordial, sage tea, kefir, limeade, assam tea, grape juice, almond milk, sparkling water,
            caramel milk, apple juice, oat water, oolong, cream soda, coconut water"""
        ),
        "street": _words(
            """Bramley Road, Castle Street, Potter Lane, Poplar Drive, Windmill Street, Chapel Hill, Saddler Row, Gravel Path,
            Candle Court, Saint Luke Place, Dyer Street, Meadow View, Heron Avenue, Canal Side, Bluebell Way, Raven Street,
            Depot Road, Gorse Grove, Colonel Street, Pier Road, Pilgrim Alley, Chestnut Walk, Signal Street, Brewery Yard"""
        ),
        "fear": _words(
            """cockroaches, lightning, ladders, the open sea, beetles, cable cars, blood, masks, revolving doors, hornets, turbulence,
            graveyards, ghosts, public speaking, surgeons, caves, lizards, dolls, crows, attics, balloons, sharks,
            geese, glass floors"""
        ),
        "trip": _words(
            """Greenland, the Andes, Cyprus, Botswana, Cambodia, the Canaries, Sicily, Nepal, Paraguay, Svalbard, Madagascar,
            New Zealand, Georgia, the Orkneys, Panama, Goa, Crete, Yukon, Oman, Bermuda, Java, Tuscany, Gambia, the Pyrenees"""
        ),
        "subject": _words(
            """physics, literature, composition, mathematics, sociology, accounting, forestry, history, religious studies, logic,
            photography, hydrology, ethics, midwifery, sculpture, journalism studies, classics, computing, ecology, pharmacy,
            architecture, genetics, ceramics, geography"""
        ),
    },
}
"""Pool → kind of fact → values. No value is in both pools."""

NEUTRAL: dict[Pool, tuple[str, ...]] = {
    "test": (
        "The Danube rises in the Black Forest and flows east for almost three thousand kilometres. It passes ten countries and "
        "four capitals before it reaches the Black Sea, where it forms a wide delta.",
        "Rinse a cup of lentils and put them in a pot with chopped onion, two carrots and a bay leaf. Cover with water, simmer "
        "for half an hour, then season with salt, pepper and a little vinegar.",
        "The city council voted on Tuesday to reopen the old swimming hall. Repairs are expected to take two years, officials "
        "said, and the cost will be shared with the regional government.",
        "To change a flat tyre, loosen the nuts a little before you lift the car. Place the jack on firm ground, raise the "
        "wheel, swap it for the spare, and tighten the nuts in a cross pattern.",
        "Question: Why does ice float on water?\nAnswer: Water expands when it freezes, so a block of ice is less dense than "
        "the liquid around it. About nine tenths of an iceberg stay below the surface.",
        "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. In plants it happens inside chloroplasts, "
        "small green bodies that hold the pigment chlorophyll and give leaves their colour.",
        "The printing press spread quickly through Europe after the middle of the fifteenth century. Within fifty years there "
        "were presses in more than two hundred towns, and books became far cheaper.",
        "Light rain is expected in the north until noon, followed by dry and sunny spells. Winds stay moderate from the west, "
        "and temperatures will climb to about sixteen degrees in the afternoon.",
        "User: What is the difference between a comet and an asteroid?\nAssistant: A comet is made mostly of ice and dust and "
        "grows a tail near the Sun, while an asteroid is rock or metal and has none.",
        "A leap year has three hundred and sixty-six days. Years divisible by four are leap years, except those divisible by a "
        "hundred, unless they can also be divided by four hundred.",
        "The old mill stood at the bend of the stream, its wheel long since still. In autumn the leaves gathered against the "
        "door, and only the swallows went in and out.",
        "This lamp is meant for indoor use only. Unplug it before you change the bulb, do not cover the shade, and use bulbs "
        "of at most forty watts. Clean the base with a dry cloth.",
        "User: How many players are there in a volleyball team?\nAssistant: Six on the court at a time. They rotate clockwise "
        "whenever their side wins back the serve, and a set is usually played to twenty-five.",
        "Shares closed slightly higher on Thursday as oil prices eased. Banks and carmakers led the gains, while retailers fell "
        "after a weak report on consumer spending in the last quarter.",
    ),
    "train": (
        "The Sahara is the largest hot desert on Earth. Most of it is not sand but bare rock and gravel, and in the "
        "mountains of its centre snow falls in some winters.",
        "Whisk three eggs with a pinch of salt, pour them into a hot buttered pan and stir gently. When the edges set, add "
        "grated cheese, fold the omelette over and slide it onto a warm plate.",
        "Rail workers ended their strike on Monday after reaching an agreement on wages. Trains should run normally again by "
        "the weekend, a spokesman announced, although some night services remain cancelled.",
        "To repot a plant, choose a container slightly wider than the old one. Loosen the roots with your fingers, fill in fresh "
        "soil around them, press it down lightly and water well.",
        "Question: What causes the tides?\nAnswer: The gravity of the Moon, and to a smaller degree of the Sun, pulls on the "
        "oceans. As the Earth turns, coasts pass through two bulges of water each day.",
        "Granite is formed when magma cools slowly deep underground. The slow cooling lets large crystals grow, mainly of "
        "quartz, feldspar and mica, which give the stone its speckled look.",
        "The first underground railway opened in London in 1863. Its carriages were lit by gas and drawn by steam engines, and "
        "nearly forty thousand passengers used it on the opening day.",
        "Fog patches will clear slowly in the valleys this morning. Later it turns cloudy with scattered showers along the "
        "coast, and overnight the first frost of the season is possible inland.",
        "User: What is the difference between baking soda and baking powder?\nAssistant: Baking soda needs an acid to work. "
        "Baking powder already contains a dry acid, so it only needs moisture and heat.",
        "A prime number has exactly two divisors, one and itself. Two is the only even prime, and Euclid showed more than "
        "two thousand years ago that the list of primes never ends.",
        "Beyond the harbour the sea lay flat and pale. A single boat crossed toward the lighthouse, drawing a thin line on the "
        "water that was gone before anyone had noticed it.",
        "Store the tablets below twenty-five degrees and out of the reach of children. Take one with a glass of water after a "
        "meal, and do not exceed three in any period of twenty-four hours.",
        "User: Why do leaves change colour in autumn?\nAssistant: Trees break down their chlorophyll when days grow short. The "
        "yellow and orange pigments, hidden until then, become visible before the leaves fall.",
        "The museum reported a record number of visitors last year. Its new wing, which houses a collection of maps and early "
        "globes, drew more than half of them, according to the director.",
    ),
}
"""Short texts about the world, in several registers, that say nothing about anybody."""

__all__ = ["NEUTRAL", "VALUES", "Pool"]
