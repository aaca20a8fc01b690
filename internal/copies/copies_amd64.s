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
