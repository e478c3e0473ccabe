"""The colours of all pictures: told apart by colour-blind eyes too (Okabe & Ito 2008; Tol 2021, "muted")."""

BLUE, RED, GREEN, ORANGE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999"
SKY, YELLOW, PINK, BLACK = "#56B4E9", "#F0E442", "#CC79A7", "#000000"
WINE, TEAL, INDIGO, OLIVE, SAND, PALE = "#882255", "#44AA99", "#332288", "#999933", "#DDCC77", "#DDDDDD"

TIME = {
    "arithmetic": BLUE,
    "waiting": GREY,
    "model": ORANGE,
    "pipeline": GREEN,
    "data": RED,
    "optimizer": WINE,
}
"""What the seconds of a step go to."""

MEMORY = {
    "parameters": SKY,
    "optimizer": WINE,
    "their bfloat16 copy": INDIGO,
    "batch": PALE,
    "batch statistics": OLIVE,
    "in flight": BLACK,
    "gradients": YELLOW,
    "weights in use": PINK,
    "activations": TEAL,
    "the update": SAND,
    "arguments": SKY,
    "temporaries": TEAL,
}
"""What a device holds. No colour but the optimizer's is one of `TIME` too, beside which it is drawn."""
