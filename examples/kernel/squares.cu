// backend/cuda/ptx.sh compiles it. No header of CUDA is needed.
extern "C" __attribute__((global)) void squares(unsigned *x, unsigned n, unsigned first) {
	unsigned i = __nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
	if (i < n)
		x[i] = (first + i) * (first + i);
}
