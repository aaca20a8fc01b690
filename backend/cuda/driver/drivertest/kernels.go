package drivertest

// The kernels that the suite launches. An image has them as PTX, below, or as
// what the driver takes instead; the simulator has Go functions of these names.
const (
	// Fill(dst *u32, value u32, n u32) sets n words.
	Fill = "c10d_test_fill"
	// Add(dst, src *u32, n u32) adds n words.
	Add = "c10d_test_add"
	// Delay(cycles u64) takes at least so many clock cycles.
	Delay = "c10d_test_delay"
	// Await(word *u32, value u32) ends when int32(*word - value) >= 0, or after
	// some seconds.
	Await = "c10d_test_await"
	// Params(out *u32, a u32, table [32]byte aligned to 8, b u32, c f32) writes a,
	// the table's 8 words, b and c's bits to 11 words.
	Params = "c10d_test_params"
)

// PTX has the kernels for devices of compute capability 6.0 and later. Every
// loop is over the whole grid, so a launch of any shape does the work.
const PTX = `.version 6.0
.target sm_60
.address_size 64

.visible .entry c10d_test_fill(
	.param .u64 fill_dst,
	.param .u32 fill_value,
	.param .u32 fill_n
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<5>;
	ld.param.u64 %rd1, [fill_dst];
	ld.param.u32 %r1, [fill_value];
	ld.param.u32 %r2, [fill_n];
	cvta.to.global.u64 %rd2, %rd1;
	mov.u32 %r3, %ctaid.x;
	mov.u32 %r4, %ntid.x;
	mov.u32 %r5, %tid.x;
	mad.lo.u32 %r6, %r3, %r4, %r5;
	mov.u32 %r7, %nctaid.x;
	mul.lo.u32 %r8, %r7, %r4;
FILL_NEXT:
	setp.ge.u32 %p1, %r6, %r2;
	@%p1 bra FILL_END;
	mul.wide.u32 %rd3, %r6, 4;
	add.u64 %rd4, %rd2, %rd3;
	st.global.u32 [%rd4], %r1;
	add.u32 %r6, %r6, %r8;
	bra.uni FILL_NEXT;
FILL_END:
	ret;
}

.visible .entry c10d_test_add(
	.param .u64 add_dst,
	.param .u64 add_src,
	.param .u32 add_n
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<12>;
	.reg .b64 %rd<8>;
	ld.param.u64 %rd1, [add_dst];
	ld.param.u64 %rd2, [add_src];
	ld.param.u32 %r1, [add_n];
	cvta.to.global.u64 %rd3, %rd1;
	cvta.to.global.u64 %rd4, %rd2;
	mov.u32 %r3, %ctaid.x;
	mov.u32 %r4, %ntid.x;
	mov.u32 %r5, %tid.x;
	mad.lo.u32 %r6, %r3, %r4, %r5;
	mov.u32 %r7, %nctaid.x;
	mul.lo.u32 %r8, %r7, %r4;
ADD_NEXT:
	setp.ge.u32 %p1, %r6, %r1;
	@%p1 bra ADD_END;
	mul.wide.u32 %rd5, %r6, 4;
	add.u64 %rd6, %rd3, %rd5;
	add.u64 %rd7, %rd4, %rd5;
	ld.global.u32 %r9, [%rd6];
	ld.global.u32 %r10, [%rd7];
	add.u32 %r11, %r9, %r10;
	st.global.u32 [%rd6], %r11;
	add.u32 %r6, %r6, %r8;
	bra.uni ADD_NEXT;
ADD_END:
	ret;
}

.visible .entry c10d_test_delay(
	.param .u64 delay_cycles
)
{
	.reg .pred %p<2>;
	.reg .b64 %rd<5>;
	ld.param.u64 %rd1, [delay_cycles];
	mov.u64 %rd2, %clock64;
DELAY_NEXT:
	mov.u64 %rd3, %clock64;
	sub.u64 %rd4, %rd3, %rd2;
	setp.lt.u64 %p1, %rd4, %rd1;
	@%p1 bra DELAY_NEXT;
	ret;
}

.visible .entry c10d_test_await(
	.param .u64 await_word,
	.param .u32 await_value
)
{
	.reg .pred %p<3>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<6>;
	ld.param.u64 %rd1, [await_word];
	ld.param.u32 %r1, [await_value];
	cvta.to.global.u64 %rd2, %rd1;
	mov.u64 %rd3, %clock64;
AWAIT_NEXT:
	ld.volatile.global.u32 %r2, [%rd2];
	sub.s32 %r3, %r2, %r1;
	setp.ge.s32 %p1, %r3, 0;
	@%p1 bra AWAIT_END;
	mov.u64 %rd4, %clock64;
	sub.u64 %rd5, %rd4, %rd3;
	setp.lt.u64 %p2, %rd5, 40000000000;
	@%p2 bra AWAIT_NEXT;
AWAIT_END:
	membar.sys;
	ret;
}

.visible .entry c10d_test_params(
	.param .u64 params_out,
	.param .u32 params_a,
	.param .align 8 .b8 params_table[32],
	.param .u32 params_b,
	.param .f32 params_c
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<14>;
	.reg .b64 %rd<3>;
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	or.b32 %r2, %r1, %r2;
	setp.ne.u32 %p1, %r2, 0;
	@%p1 bra PARAMS_END;
	ld.param.u64 %rd1, [params_out];
	cvta.to.global.u64 %rd2, %rd1;
	ld.param.u32 %r3, [params_a];
	st.global.u32 [%rd2], %r3;
	ld.param.u32 %r4, [params_table];
	st.global.u32 [%rd2+4], %r4;
	ld.param.u32 %r5, [params_table+4];
	st.global.u32 [%rd2+8], %r5;
	ld.param.u32 %r6, [params_table+8];
	st.global.u32 [%rd2+12], %r6;
	ld.param.u32 %r7, [params_table+12];
	st.global.u32 [%rd2+16], %r7;
	ld.param.u32 %r8, [params_table+16];
	st.global.u32 [%rd2+20], %r8;
	ld.param.u32 %r9, [params_table+20];
	st.global.u32 [%rd2+24], %r9;
	ld.param.u32 %r10, [params_table+24];
	st.global.u32 [%rd2+28], %r10;
	ld.param.u32 %r11, [params_table+28];
	st.global.u32 [%rd2+32], %r11;
	ld.param.u32 %r12, [params_b];
	st.global.u32 [%rd2+36], %r12;
	ld.param.u32 %r13, [params_c];
	st.global.u32 [%rd2+40], %r13;
PARAMS_END:
	ret;
}
`
