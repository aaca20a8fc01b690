#include "textflag.h"

// func claim(at *byte, lines int)
TEXT ·claim(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), AX
	MOVQ lines+8(FP), CX
next:
	BYTE $0x0f; BYTE $0x0d; BYTE $0x08 // PREFETCHW (AX), which the assembler lacks
	ADDQ $64, AX
	DECQ CX
	JNZ  next
	RET
