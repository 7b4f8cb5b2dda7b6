"""The part of the doctor that lives in a rank. It imports torch; nothing above `train` needs it but by name.

`hooks` turns what torch does into events, `probe` hands them to the parts and sends what they say, each part looks at
one class of faults. Nothing here waits for another rank, changes a tensor, draws a random number or calls a collective.
"""
