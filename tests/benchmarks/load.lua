-- Sends prepared requests one after another over every connection.
-- Arguments: a file of paths, a file of the body (empty for GET), the token.

local requests, last = {}, 0

function init(arguments)
   local body = io.open(arguments[2]):read("*a")
   local method = body == "" and "GET" or "POST"
   local headers = { Authorization = "Bearer " .. arguments[3] }
   if body == "" then body = nil else headers["Content-Type"] = "application/json" end
   for path in io.lines(arguments[1]) do
      requests[#requests + 1] = wrk.format(method, path, headers, body)
   end
end

function request()
   last = last % #requests + 1
   return requests[last]
end
