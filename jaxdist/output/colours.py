"""The colours of all pictures, which colour-blind readers can distinguish too (Okabe & Ito 2008; Tol 2021)."""

from jaxdist.mesh import CONTEXT, EXPERT

# Okabe & Ito
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
ORANGE = "#E69F00"
SKY = "#56B4E9"
YELLOW = "#F0E442"
PINK = "#CC79A7"
BLACK = "#000000"
GREY = "#999999"

# Tol, "muted"
WINE = "#882255"
TEAL = "#44AA99"
INDIGO = "#332288"
OLIVE = "#999933"
SAND = "#DDCC77"
ROSE = "#CC6677"
FOREST = "#117733"
PALE = "#DDDDDD"
PURPLE = "#AA4499"

# Tol, "bright"
CYAN = "#66CCEE"

TIME = {
    "arithmetic": BLUE,
    "waiting": GREY,
    CONTEXT: CYAN,
    EXPERT: PURPLE,
    "model": ORANGE,
    "pipeline": GREEN,
    "data": RED,
    "optimizer": WINE,
}
"""Parts of the time of a step."""

MEMORY = {
    "parameters": SKY,
    "optimizer": WINE,
    "their bfloat16 copy": INDIGO,
    "batch": PALE,
    "batch statistics": OLIVE,
    "in flight": BLACK,
    "errors of compression": ROSE,
    "at the last outer step": FOREST,
    "gradients": YELLOW,
    "weights in use": PINK,
    "activations": TEAL,
    "the update": SAND,
    "arguments": SKY,
    "temporaries": TEAL,
}
"""Parts of the memory of a device. It is drawn beside `TIME`, so only the optimizer has the same colour in both."""
