-- Sends prepared requests one after another over every connection, and prints what came of it as JSON.
-- Arguments: a file of paths, a file of the body (empty for GET), the token, milliseconds between requests, the end of
-- every Idempotency-Key (or none: no keys).

local KEY = "its-own-key"
local requests, last, sent = {}, 0, 0

function init(arguments)
   local body = io.open(arguments[2]):read("*a")
   local method = body == "" and "GET" or "POST"
   local headers = { Authorization = "Bearer " .. arguments[3] }
   if body == "" then body = nil else headers["Content-Type"] = "application/json" end
   pause, key_end = tonumber(arguments[4]), arguments[5]
   if key_end then headers["Idempotency-Key"] = KEY end
   for path in io.lines(arguments[1]) do
      local whole = wrk.format(method, path, headers, body)
      local from, to = whole:find(KEY, 1, true)
      requests[#requests + 1] = key_end and { whole:sub(1, from - 1), whole:sub(to + 1) } or whole
   end
end

function request()
   last = last % #requests + 1
   if not key_end then return requests[last] end
   sent = sent + 1
   local whole, random = requests[last], math.random(0, 0x7fffffff) -- first, because UUIDs have no order either
   return whole[1] .. bit.tohex(random) .. bit.tohex(sent) .. key_end .. whole[2]
end

if os.getenv("PACED") then
   function delay() return pause end
end

function done(summary, latency, _)
   local errors = summary.errors
   io.write(string.format(
      '\n{"requests":%d,"seconds":%f,"failed":%d,"p50":%f,"p99":%f}\n',
      summary.requests, summary.duration / 1e6,
      errors.connect + errors.read + errors.write + errors.status + errors.timeout,
      latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
