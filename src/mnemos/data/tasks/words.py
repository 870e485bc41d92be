"""Words for random names "adjective-noun", about thirteen thousand combinations."""

_ADJECTIVES = """
able amber ancient bitter blue bold brave brisk broad calm clever cold copper crisp curious damp dark deep distant dry
eager early faint famous fierce fine firm foreign frozen gentle gifted golden grand green happy heavy hidden hollow
honest humble icy idle jolly keen kind large lean light little lively lonely loud loyal lucky mellow mild modern
narrow neat noble odd open pale patient plain polite proud quick quiet rapid rare red rich ripe rough round royal
rural sharp shy silent silver simple slow small smooth soft solid steady steep stern still strange strong sunny sweet
swift tall tame tender thick thin tidy tiny tough vast warm wide wild wise young
"""
_NOUNS = """
anchor apron arrow autumn badge barrel basin beacon bell bench blanket bottle bridge bucket butter button cabin camera
candle canyon carpet castle cedar chain chalk cherry circle clock cloud coast comet coral cotton cradle crane crown
curtain desert diamond dolphin drum eagle engine falcon feather fence ferry field flame flute forest fountain galaxy
glacier glove goose guitar hammer harbor harvest helmet hill honey horizon island ivory jacket jungle kettle ladder
lake lantern lemon lever lion marble market meadow mirror mountain needle ocean olive orchard otter owl paddle palace
pebble pencil pepper piano pillow planet pocket prairie quarry ribbon river rocket saddle sail shadow shell signal
spoon spring stone sunset temple thunder timber tower tunnel turtle valley velvet violin wagon walnut whale willow
window winter yard
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
