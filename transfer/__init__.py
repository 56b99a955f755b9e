"""Moving KV cache between engines: layouts, read plans, leases, the guard, data planes.

Knows neither requests' life nor who owns which block: ids are integers, memory is a list of buffers.
"""
