"""Deciding before and while training: which codec and interval suit the links. Pure: no torch, no sockets, no clock.

facts       what is known of nodes, links and codecs
wire        bytes of a payload
frontier    expected held-out loss of codecs and intervals
predict     time of one round with given settings
choice      the best settings, the alternatives, why
settings    what a run uses: given, default or measured
codec_speed measures this machine
"""
