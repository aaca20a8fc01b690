//go:build !race

#include "textflag.h"

// func isAMD() bool
TEXT ·isAMD(SB), NOSPLIT, $0-1
	XORL AX, AX
	XORL CX, CX
	CPUID
	CMPL BX, $0x68747541 // Auth
	JNE  no
	CMPL DX, $0x69746e65 // enti
	JNE  no
	CMPL CX, $0x444d4163 // cAMD
	JNE  no
	MOVB $1, ret+0(FP)
	RET
no:
	MOVB $0, ret+0(FP)
	RET

// func moveString(dst, src *byte, n uintptr)
TEXT ·moveString(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	REP; MOVSB
	RET

// func moveUncached(dst, src *byte, n uintptr)
TEXT ·moveUncached(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
next:
	MOVOU  (SI), X0
	MOVOU  16(SI), X1
	MOVOU  32(SI), X2
	MOVOU  48(SI), X3
	MOVNTO X0, (DI)
	MOVNTO X1, 16(DI)
	MOVNTO X2, 32(DI)
	MOVNTO X3, 48(DI)
	ADDQ   $64, SI
	ADDQ   $64, DI
	SUBQ   $64, CX
	JNZ    next
	SFENCE            // before the store that says that the bytes are there
	RET
