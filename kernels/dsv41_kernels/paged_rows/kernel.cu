// Entry numbers -> pool rows: the definition is dsv41/cache.py. One thread per entry; the definition
// takes eight passes over memory, this one reads and writes each number once.
//
// entries (n) i64, pages (R, width) i64, request (n / each) i64 -> rows (n) i64; -1 stays -1, and an
// entry behind the last page becomes -1.

extern "C" __global__ void paged_rows(const long long* entries, const long long* pages,
                                      const long long* request, long long* rows, long long count,
                                      long long each, long long requests, long long width,
                                      long long per_page) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= count) return;
  long long entry = entries[i], r = request[i / each], page = entry / per_page;
  bool known = entry >= 0 && page < width && r >= 0 && r < requests;
  rows[i] = known ? pages[r * width + page] * per_page + entry % per_page : -1;
}
