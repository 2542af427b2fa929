"""Workers that hold the experts of one model together (data-parallel attention).

Each worker has attention whole, pages, a scheduler and its routers' streams, as by itself. Only at
layers of experts they meet. `leader` says when all run a step, and `member` hears it; `gloo` moves
the tokens; `ranks` is what an engine sees of it.
"""
