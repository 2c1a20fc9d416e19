// Decode attention of local layers, whose rows see their last tokens only. Pages before the reach of a span's rows are
// not read; the first page is masked.
#include "attend.cuh"

// attend_local_{upper,both,full}_{64,128,256}_{ROWS}(AttendArgs): as attend_* in attend.cu. More rows take several
// tiles, because a local layer has few pages.
#define ATTEND_LOCAL(name, D, VIEW, ROWS, WARPGROUPS, STAGES, PER_SM, HALF_SM, BLOCK, STAGE_BYTES, SHARED) \
  ATTEND_KERNEL(name, PER_SM, BLOCK, STAGE_BYTES, SHARED, D, VIEW, ROWS, WARPGROUPS, STAGES, HALF_SM, true)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
ATTEND_LOCAL(attend_local_upper_64_8, 64, UPPER, 8, 4, 4, 1, false, 640, 18432, 15168)
ATTEND_LOCAL(attend_local_both_64_8, 64, BOTH, 8, 3, 4, 1, false, 480, 26112, 11648)
ATTEND_LOCAL(attend_local_both_64_16, 64, BOTH, 16, 3, 4, 1, false, 480, 26112, 29056)
ATTEND_LOCAL(attend_local_full_64_8, 64, FULL, 8, 3, 4, 1, false, 480, 24576, 8576)
ATTEND_LOCAL(attend_local_full_64_16, 64, FULL, 16, 3, 4, 1, false, 480, 24576, 16768)
ATTEND_LOCAL(attend_local_upper_128_8, 128, UPPER, 8, 4, 4, 1, false, 640, 34816, 20288)
ATTEND_LOCAL(attend_local_both_128_8, 128, BOTH, 8, 3, 3, 1, false, 480, 50688, 15744)
ATTEND_LOCAL(attend_local_both_128_16, 128, BOTH, 16, 3, 3, 1, false, 480, 50688, 37248)
ATTEND_LOCAL(attend_local_full_128_8, 128, FULL, 8, 3, 4, 1, false, 480, 49152, 15744)
ATTEND_LOCAL(attend_local_full_128_16, 128, FULL, 16, 3, 4, 1, false, 480, 49152, 31104)
ATTEND_LOCAL(attend_local_upper_256_8, 256, UPPER, 8, 3, 3, 1, false, 512, 52224, 30080)
ATTEND_LOCAL(attend_local_both_256_8, 256, BOTH, 8, 2, 3, 1, false, 384, 67584, 21440)
ATTEND_LOCAL(attend_local_both_256_16, 256, BOTH, 16, 2, 2, 1, false, 384, 67584, 42624)
ATTEND_LOCAL(attend_local_full_256_8, 256, FULL, 8, 2, 3, 1, false, 384, 65536, 21440)
ATTEND_LOCAL(attend_local_full_256_16, 256, FULL, 16, 2, 2, 1, false, 384, 65536, 42624)
#else
ATTEND_LOCAL(attend_local_upper_64_8, 64, UPPER, 8, 1, 0, 4, false, 128, 4608, 4480)
ATTEND_LOCAL(attend_local_both_64_8, 64, BOTH, 8, 1, 0, 3, false, 128, 8704, 4480)
ATTEND_LOCAL(attend_local_both_64_16, 64, BOTH, 16, 1, 0, 3, false, 128, 8704, 11008)
ATTEND_LOCAL(attend_local_full_64_8, 64, FULL, 8, 1, 0, 3, false, 128, 8192, 2432)
ATTEND_LOCAL(attend_local_full_64_16, 64, FULL, 16, 1, 0, 3, false, 128, 8192, 5888)
ATTEND_LOCAL(attend_local_upper_128_8, 128, UPPER, 8, 1, 0, 4, false, 128, 8704, 6528)
ATTEND_LOCAL(attend_local_both_128_8, 128, BOTH, 8, 1, 0, 3, false, 128, 16896, 6528)
ATTEND_LOCAL(attend_local_both_128_16, 128, BOTH, 16, 1, 0, 3, false, 128, 16896, 15104)
ATTEND_LOCAL(attend_local_full_128_8, 128, FULL, 8, 1, 0, 3, false, 128, 16384, 3456)
ATTEND_LOCAL(attend_local_full_128_16, 128, FULL, 16, 1, 0, 3, false, 128, 16384, 7936)
#ifdef QS_SM80  // elsewhere heads of 256 channels are refused
ATTEND_LOCAL(attend_local_upper_256_8, 256, UPPER, 8, 1, 0, 2, false, 128, 17408, 10624)
ATTEND_LOCAL(attend_local_both_256_8, 256, BOTH, 8, 1, 0, 2, false, 128, 33792, 10624)
ATTEND_LOCAL(attend_local_both_256_16, 256, BOTH, 16, 1, 0, 2, false, 128, 33792, 23296)
ATTEND_LOCAL(attend_local_full_256_8, 256, FULL, 8, 1, 0, 2, false, 128, 32768, 5504)
ATTEND_LOCAL(attend_local_full_256_16, 256, FULL, 16, 1, 0, 2, false, 128, 32768, 12032)
#endif
#endif
