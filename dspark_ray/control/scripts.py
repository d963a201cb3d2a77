"""Lua scripts of the control plane: what must happen at once, or in one round trip.

All keys carry the same hash tag, so the scripts also run on Redis Cluster.
"""

# KEYS lease, epoch counter. ARGV owner, lease ms, the owner's own last epoch.
# An epoch is at least the server's time in ms: it keeps rising when FLUSHALL or a restart loses the counter.
ACQUIRE = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return false end
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local epoch = string.format('%.0f', math.max(last + 1, tonumber(ARGV[3]) + 1, now_ms))
redis.call('SET', KEYS[2], epoch)
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', epoch)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return epoch
"""

# KEYS lease, policies. ARGV owner, epoch, lease ms, policies ms, number of fields to delete, those fields,
# then field, value, ... Fenced: writes nothing unless the caller still rules in that very epoch.
PUBLISH = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local first = 6 + tonumber(ARGV[5])
for i = 6, first - 1 do redis.call('HDEL', KEYS[2], ARGV[i]) end
for i = first, #ARGV, 1000 do
  redis.call('HSET', KEYS[2], unpack(ARGV, i, math.min(i + 999, #ARGV)))
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
"""

# KEYS lease. ARGV owner. Gives the right to rule back.
RELEASE = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

# KEYS index. ARGV prefix of the sample keys. One MessagePack array of all samples: a single reply is much
# cheaper to read than a thousand. Names whose sample has expired leave the index.
READ_SAMPLES = """
local names = redis.call('SMEMBERS', KEYS[1])
local blobs = {}
for first = 1, #names, 1000 do
  local keys = {}
  for i = first, math.min(first + 999, #names) do keys[#keys + 1] = ARGV[1] .. names[i] end
  local values = redis.call('MGET', unpack(keys))
  for i = 1, #keys do
    if values[i] then blobs[#blobs + 1] = values[i]
    else redis.call('SREM', KEYS[1], names[first + i - 1]) end
  end
end
return struct.pack('>BI4', 0xdd, #blobs) .. table.concat(blobs)
"""

ALL = {"acquire": ACQUIRE, "publish": PUBLISH, "release": RELEASE, "read_samples": READ_SAMPLES}
