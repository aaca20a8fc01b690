// The kernels of a perceptron's training. Every thread computes whole elements
// of a result, each with the sums in the order of package mlp's loops, and
// nothing is contracted to fused multiply-adds (see backend/cuda/ptx.sh): what is in float32
// has the bits of the CPU's. exp, log and tanh are computed in double, as there,
// to within 1e-13, and so differ from the CPU's only where such a difference
// changes the rounding to float32.
//
// It needs no header of CUDA's and no library.

#define GLOBAL extern "C" __attribute__((global)) void
#define DEVICE static inline __attribute__((device, always_inline))

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

DEVICE i64 first() {
	return (i64)__nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
}

DEVICE i64 stride() {
	return (i64)__nvvm_read_ptx_sreg_nctaid_x() * __nvvm_read_ptx_sreg_ntid_x();
}

// A loop over all elements, whatever the shape of the launch.
#define EACH(i, n) for (i64 i = first(); i < (n); i += stride())

// power2 returns 2^k for k within the exponents of normal numbers.
DEVICE double power2(i64 k) {
	union { u64 u; double d; } x;
	x.u = (u64)(k + 1023) << 52;
	return x.d;
}

// exponential returns e^x; 0 below -700. x is at most 700 here, or no number.
DEVICE double exponential(double x) {
	if (x < -700)
		return 0;
	double k = x * 1.44269504088896340736;
	i64 n = (i64)(k < 0 ? k - 0.5 : k + 0.5);
	// ln 2 in two parts, the first with so few bits that n times it is exact.
	double r = x - (double)n * 6.93147180369123816490e-01;
	r -= (double)n * 1.90821492927058770002e-10;
	// Taylor's series; |r| is at most 0.347, and 0.347^15/15! is 1e-19.
	double sum = 1;
	for (int i = 14; i > 0; i--)
		sum = 1 + r * sum / i;
	return sum * power2(n);
}

// logarithm returns ln x for x of 1 and more, or no number.
DEVICE double logarithm(double x) {
	union { u64 u; double d; } y;
	y.d = x;
	i64 n = (i64)(y.u >> 52) - 1023;
	if (n > 1023)
		return x;
	y.u = (y.u & 0xfffffffffffffULL) | (1023ULL << 52);
	double m = y.d;
	if (m > 1.41421356237309504880) {
		m /= 2;
		n++;
	}
	// ln m = 2 artanh f; |f| is at most 0.172, and 0.172^25/25 is 3e-21.
	double f = (m - 1) / (m + 1), g = f * f, sum = 0;
	for (int i = 23; i > 0; i -= 2)
		sum = sum * g + 1.0 / i;
	return (double)n * 0.69314718055994530942 + 2 * f * sum;
}

DEVICE float hyperbolic(float v) {
	double x = v, a = x < 0 ? -x : x;
	if (a < 1e-3) {
		double g = x * x;
		return (float)(x * (1 - g * (1.0 / 3 - g * (2.0 / 15))));
	}
	if (a > 20)
		return x < 0 ? -1.0f : 1.0f;
	double e = exponential(2 * a), t = (e - 1) / (e + 1);
	return (float)(x < 0 ? -t : t);
}

// y = x w + b for n rows, then tanh if asked.
GLOBAL c10d_mlp_linear(float *y, const float *x, const float *w, const float *b, u32 n, u32 in, u32 out, u32 tanh) {
	EACH(e, (i64)n * out) {
		i64 k = e / out, j = e % out;
		float sum = b[j];
		for (i64 i = 0; i < in; i++) {
			float v = x[k * in + i];
			if (v != 0)
				sum += v * w[i * out + j];
		}
		y[e] = tanh ? hyperbolic(sum) : sum;
	}
}

// The loss of each of n images, whether its class got the most, and, unless
// delta is null, scale times the derivative of the loss by y.
GLOBAL c10d_mlp_softmax(double *loss, u32 *right, float *delta, const float *y, const u8 *labels, u32 n, u32 classes, float scale) {
	EACH(k, n) {
		const float *row = y + k * classes;
		float top = row[0];
		for (u32 j = 1; j < classes; j++)
			top = row[j] > top ? row[j] : top;
		double sum = 0;
		for (u32 j = 0; j < classes; j++)
			sum += exponential((double)(row[j] - top));
		u32 label = labels[k];
		loss[k] = logarithm(sum) - (double)(row[label] - top);
		right[k] = row[label] == top;
		if (!delta)
			continue;
		float *d = delta + k * classes;
		for (u32 j = 0; j < classes; j++)
			d[j] = scale * (float)(exponential((double)(row[j] - top)) / sum);
		d[label] -= scale;
	}
}

// The gradients of a weight and, as its last row, of the bias.
GLOBAL c10d_mlp_param_grad(float *w, float *b, const float *x, const float *delta, u32 n, u32 in, u32 out) {
	EACH(e, ((i64)in + 1) * out) {
		i64 i = e / out, j = e % out;
		float sum = 0;
		for (i64 k = 0; k < n; k++) {
			float v = i < in ? x[k * in + i] : 1.0f;
			if (v != 0)
				sum += v * delta[k * out + j];
		}
		if (i < in)
			w[e] = sum;
		else
			b[j] = sum;
	}
}

// The derivative by what tanh made x from.
GLOBAL c10d_mlp_input_grad(float *dx, const float *x, const float *w, const float *delta, u32 n, u32 in, u32 out) {
	EACH(e, (i64)n * in) {
		i64 k = e / in, i = e % in;
		const float *p = w + i * out, *d = delta + k * out;
		float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
		i64 j = 0;
		for (; j + 4 <= out; j += 4) {
			s0 += p[j] * d[j];
			s1 += p[j + 1] * d[j + 1];
			s2 += p[j + 2] * d[j + 2];
			s3 += p[j + 3] * d[j + 3];
		}
		for (; j < out; j++)
			s0 += p[j] * d[j];
		float v = x[e];
		dx[e] = (1 - v * v) * (s0 + s1 + (s2 + s3));
	}
}

// A step of stochastic gradient descent with momentum.
GLOBAL c10d_mlp_step(float *value, float *velocity, const float *grad, u64 n, float rate, float momentum) {
	EACH(i, (i64)n) {
		float v = momentum * velocity[i] + grad[i];
		velocity[i] = v;
		value[i] -= rate * v;
	}
}
