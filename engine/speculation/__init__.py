"""Speculative decoding: a cheap drafter guesses the next tokens, and one step verifies them.

Life of a row's step of width W:

1. The device has its length, its last token and up to W - 1 drafts (`SlotTables`). The step
   computes all of these tokens at once.
2. Column j draws the next token behind the first j drafts, with the noise of its output index, as
   a step without drafts would. A draft is accepted if it is the token drawn. So the first draw that
   differs from its draft still counts, and what is behind it does not.
3. The device moves the length on by the tokens that count. KV of drafts that failed stays behind
   the length, and the next step overwrites it.
4. The drafter reads the new tokens and drafts again.

So the output is the same function of logits and seed as without drafts, whatever the drafter says,
for greedy and for drawn rows. A drafter's state may be lost at any time: that costs speed alone. (A
batch of another size may round in another way, here as everywhere.)

The host does not wait for a length. While a step is in flight it knows a least and a most
(`engine.schedule.slots`), and plans pages for the most.
"""
