"""Plain word lists: first names, and things somebody may like. All ASCII, each word once, in alphabetical order."""

NAMES: tuple[str, ...] = tuple(
    """
Adam Agnes Alan Albert Alex Alfred Alice Allen Alma Amanda Amber Amelia Amy Andre Andrea Andrew Andy Angela Ann Anna
Anne Annie Anthony Anton Antonio Ariel Arnold Arthur Ashley Audrey August Austin Barbara Barry Basil Beatrice Becky
Ben Benjamin Bernard Beth Betty Bill Billy Blake Bob Bobby Brad Bradley Brandon Brenda Brian Bridget Bruce Bryan
Calvin Cameron Carl Carla Carlos Carmen Carol Caroline Carrie Casey Catherine Cecil Charles Charlie Charlotte Chester
Chris Christian Christina Christine Christopher Cindy Claire Clara Clark Claude Clifford Clinton Cole Colin Connie
Connor Craig Curtis Cynthia Daisy Dale Dan Daniel Danny Darren Dave David Dean Deborah Dennis Derek Diana Diane Diego
Dominic Don Donald Donna Dora Doris Dorothy Doug Douglas Duncan Dylan Earl Eddie Edgar Edith Edmund Eduardo Edward
Edwin Eileen Elaine Eleanor Elena Eli Elias Elijah Elizabeth Ella Ellen Elliott Emily Emma Eric Erik Erin Ernest
Esther Ethan Eugene Eva Evan Evelyn Faith Felix Fernando Fiona Florence Floyd Frances Francis Francisco Frank Franklin
Fred Frederick Gabriel Gary Gavin Gene George Gerald Gilbert Gina Glenn Gloria Gordon Grace Graham Grant Greg Gregory
Guy Hannah Harold Harriet Harrison Harry Harvey Heather Hector Heidi Helen Henry Herbert Herman Holly Howard Hugh Hugo
Ian Ida Igor Irene Iris Isaac Isabel Ivan Jack Jackie Jackson Jacob Jake James Jamie Jan Jane Janet Janice Jason Jay
Jean Jeff Jeffrey Jen Jennifer Jenny Jeremy Jerome Jerry Jess Jesse Jessica Jill Jim Jimmy Joan Joanna Joe Joel John
Johnny Jon Jonathan Jordan Jorge Jose Joseph Josh Joshua Joyce Juan Judith Judy Julia Julian Julie Justin Karen Karl
Kate Katherine Kathleen Kathy Katie Kay Keith Kelly Ken Kenneth Kevin Kim Kurt Kyle Lance Larry Laura Lauren Lawrence
Lee Leo Leon Leonard Leslie Lewis Liam Lily Linda Lisa Logan Louis Louise Lucas Lucy Luis Luke Lydia Lynn Madison
Malcolm Manuel Marc Marcus Margaret Maria Marie Marilyn Mario Marion Mark Marshall Martha Martin Marvin Mary Mason
Matt Matthew Maurice Max Maya Megan Melissa Mia Michael Michelle Miguel Mike Miles Mitchell Mohammed Molly Monica
Morgan Morris Nancy Naomi Natalie Nathan Neil Nelson Nicholas Nick Nicole Nina Noah Nora Norman Oliver Olivia Omar
Oscar Otto Owen Pablo Pam Pamela Patricia Patrick Paul Paula Pedro Peggy Penny Percy Perry Pete Peter Philip Phyllis
Pierre Polly Priscilla Rachel Ralph Ramon Randy Ray Raymond Rebecca Reed Regina Rex Richard Rick Rita Rob Robert
Roberto Robin Rodney Roger Roland Ron Ronald Rosa Rosemary Ross Roy Russell Ruth Ryan Sally Sam Samantha Samuel Sandra
Sandy Sara Sarah Scott Sean Seth Shane Sharon Shawn Sheila Sherman Shirley Sidney Simon Sofia Sophia Sophie Stan
Stanley Stella Stephanie Stephen Steve Steven Stewart Stuart Sue Susan Suzanne Sylvia Tara Ted Teresa Terry Theodore
Theresa Thomas Tim Timothy Tina Todd Tom Tommy Tony Tracy Travis Trevor Tyler Ursula Valerie Vanessa Vera Vernon
Veronica Victor Victoria Vincent Viola Violet Virginia Vivian Wallace Walter Wanda Warren Wayne Wendy Wesley Will
William Willie Wilson Winston Xavier Yolanda Yvonne Zach Zoe
    """.split()  # noqa: SIM905 - a list of quoted words would be three times as long
)
"""First names."""

THINGS: tuple[str, ...] = tuple(
    """
almonds animals ants apples aquariums architecture arrows art articles astronomy autumn avocados babies badges bags
ballet balloons balls bananas baseball basketball baskets batteries beaches beads beans bears beer bees bells belts
berries bicycles bikes biology birds biscuits blankets blogs blueberries boats bones books boots bottles bowls boxes
bracelets bread bricks bridges bubbles buckets burgers buses butter butterflies buttons cabbage cabins cacti cakes
calendars camels cameras camping candles candy canoes caps cards carpets carrots cars cartoons castles cats caves
cereal chains chairs chalk cheese chemistry cherries chess chickens chips chocolate churches cinema circles circus
cities clay cliffs clocks clothes clouds clubs coats coconut coffee coins colors comedy comets comics computers
concerts cookies cooking copper coral corn costumes cotton cows crabs crayons cream crickets crystals cubes cucumbers
cups curry curtains cycling dance dancing deer deserts desserts diamonds diaries dinosaurs dogs dolls dolphins doors
dragons drama drawing drawings dreams dresses drums ducks eagles earrings economics eggs elephants engines evenings
exercise fairs farming farms fashion feathers ferns fiction films fire fireworks fish fishing flags flies flour
flowers flutes flying fog folklore football forests fossils fountains foxes fruit fruits furniture games gardening
gardens garlic geese gems geography geology geometry ghosts gifts ginger giraffes glass gloves goats gold golf grammar
grapes grass guitars gymnastics hammers hats herbs hiking history hockey holidays honey horses hotels houses ice
insects iron islands ivory ivy jackets jam jazz jewelry jokes journals juice kayaks keys kites kittens knitting knives
ladders lakes lamps language lanterns laptops laughter leather leaves lemons letters lettuce libraries lilies limes
lions literature lizards logic lunch machines magazines magic magnets mangoes maps marbles markets masks mathematics
meadows meals meat medals medicine melons metals mice milk mirrors money monkeys monsters moons mornings mosaics moss
motors mountains movies mud museums mushrooms music mustard myths necklaces needles nets newspapers nights novels
numbers nuts oak oceans oil olives onions opera oranges orchids organs owls oysters painting paintings palaces
pancakes pandas paper parades parks parrots parties pasta peaches peanuts pearls pears peas pebbles pencils penguins
pens peppers perfume philosophy phones photography photos physics pianos pickles picnics pictures pies pigeons pigs
pillows pines pirates pizza planes planets plants plates poems poetry politics ponds pools popcorn poppies porridge
postcards posters potatoes pottery pudding pumpkins puppets puppies puzzles pyramids questions quilts quizzes rabbits
radio railways rain rainbows raisins raspberries reading recipes ribbons rice riddles riding rings rivers roads robots
rockets rocks roofs ropes roses rowing rugby rugs running sailing salads salmon salt sand sandwiches satellites sauce
scarves schools science scissors sculptures seafood seals seeds shadows sharks sheep shells ships shirts shoes
shopping silence silk silver singing skating sketches skiing skirts snacks snails snakes snow soap soccer socks soda
songs soup spaghetti spices spiders spinach spoons sports spring squares squirrels stamps stars statues steak steam
stickers stones stories storms strawberries streams sugar summer sunflowers sunglasses sunshine surfing swans sweaters
sweets swimming swings swords tables tea telescopes television temples tennis tents theater thunder tickets tigers
tiles toast tomatoes tools towers toys traffic trains travel trees triangles tricks trucks trumpets tulips tunnels
turkeys turnips turtles umbrellas uniforms vanilla vegetables velvet videos villages vinegar violins volcanoes
volleyball waffles walking wallets walnuts walruses watches water waterfalls watermelon waves weddings whales wheat
wheels whistles wind windows wine wings winter wolves wood wool words worms wrestling writing yachts yoga yogurt
zebras zoos
    """.split()  # noqa: SIM905 - a list of quoted words would be three times as long
)
"""Nouns that stand alone after a verb: plurals and nouns without one."""
