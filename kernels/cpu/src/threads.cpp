// Where threads run.
#include <omp.h>
#include <sched.h>

#include <algorithm>

#include "kernels.h"

int32_t quire_pin_threads(int32_t threads, const int32_t* bounds, const int32_t* cpus) {
  int32_t refused = 0;
#pragma omp parallel num_threads(threads) reduction(+ : refused)
  {
    const int32_t* const begin = cpus + bounds[omp_get_thread_num()];
    const int32_t* const end = cpus + bounds[omp_get_thread_num() + 1];
    const int32_t most = 1 + *std::max_element(begin, end);
    const size_t bytes = CPU_ALLOC_SIZE(most);
    cpu_set_t* const set = CPU_ALLOC(most);
    CPU_ZERO_S(bytes, set);
    for (const int32_t* cpu = begin; cpu != end; ++cpu) CPU_SET_S(*cpu, bytes, set);
    refused += sched_setaffinity(0, bytes, set) != 0;
    CPU_FREE(set);
  }
  return refused;
}
